"""Who has work and gets nothing done."""

import time

from tokenmill_engine.ipc.control import Pulse
from tokenmill_server.stalls import StallDetector

BUSY = Pulse(num_turns=7, has_work=True)
IDLE = Pulse(num_turns=7, has_work=False)


def test_work_without_turns_is_a_stall_and_twice_as_long_is_hopeless() -> None:
    stalls = StallDetector(10.0)
    began = time.time()
    for now in (0.0, 4.0, 8.0):
        assert not stalls.heard(3, BUSY, now)
    assert stalls.newly_stalled(10.0) == []
    ((engine, since),) = stalls.newly_stalled(10.5)
    assert engine == 3
    assert began <= since <= time.time()
    assert stalls.newly_stalled(11.0) == []
    assert stalls.hopeless(20.0) == []
    assert stalls.hopeless(20.5) == [3]


def test_who_has_nothing_to_do_never_stalls() -> None:
    stalls = StallDetector(10.0)
    for now in range(100):
        assert not stalls.heard(0, IDLE, float(now))
        assert stalls.newly_stalled(float(now)) == []
    stalls.heard(0, BUSY, 100.0)
    assert stalls.newly_stalled(109.0) == []
    assert stalls.newly_stalled(110.0) == [(0, stalls._progress[0].at_unix)]


def test_who_falls_silent_stalls_also_without_work() -> None:
    stalls = StallDetector(10.0)
    stalls.heard(0, Pulse(), 0.0)
    assert [engine for engine, _ in stalls.newly_stalled(10.5)] == [0]
    assert stalls.heard(0, IDLE, 11.0)


def test_one_more_turn_is_enough() -> None:
    stalls = StallDetector(10.0)
    stalls.heard(0, BUSY, 0.0)
    assert len(stalls.newly_stalled(11.0)) == 1
    assert stalls.heard(0, Pulse(num_turns=8, has_work=True), 12.0)
    assert not stalls.heard(0, Pulse(num_turns=9, has_work=True), 13.0)
    assert stalls.newly_stalled(22.0) == []
    assert stalls.hopeless(22.0) == []


def test_a_dead_engine_core_is_not_stalled_and_neither_is_anybody_without_a_bound() -> None:
    stalls = StallDetector(10.0)
    stalls.heard(0, BUSY, 0.0)
    stalls.forget(0)
    assert stalls.newly_stalled(100.0) == stalls.hopeless(100.0) == []
    unlimited = StallDetector(0.0)
    unlimited.heard(0, BUSY, 0.0)
    assert unlimited.newly_stalled(1e6) == unlimited.hopeless(1e6) == []
