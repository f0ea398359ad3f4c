"""The stats line: fields in the documented order, counts of the interval, idle or not."""

import re

from tokenmill_engine.messages import EngineLoad
from tokenmill_engine.scheduler.stats import IntervalStats, SchedulerCounters


def test_a_busy_interval() -> None:
    times = iter([100.0, 110.0])
    stats = IntervalStats(7, clock=lambda: next(times))
    stats.count_prefill(300, 100)
    stats.count_prefill(100, 60)
    stats.count_generated(55)
    text, busy = stats.line(EngineLoad(3, 2, 0.125), SchedulerCounters(num_preemptions=4))
    assert busy
    assert text == (
        "Engine 007: prompt throughput 40.0 tokens/s, generation throughput 5.5 tokens/s, running 3 reqs, "
        "waiting 2 reqs, preemptions 4, KV cache usage 12.5%, prefix cache hit rate 40.0%"
    )


def test_the_next_interval_starts_from_nothing_and_idleness_shows() -> None:
    stats = IntervalStats(0)
    stats.count_generated(55)
    counters = SchedulerCounters(num_preemptions=4)
    stats.line(EngineLoad(), counters)
    text, busy = stats.line(EngineLoad(), counters)
    assert not busy
    assert "preemptions" not in text
    assert re.search(r"generation throughput 0\.0 tokens/s", text)


def test_a_request_that_only_waits_is_not_idle() -> None:
    _, busy = IntervalStats(0).line(EngineLoad(num_waiting=1), SchedulerCounters())
    assert busy
