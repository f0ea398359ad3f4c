"""Balancers of several API servers together, in simulated time. See `tests.support.simulated_cluster`."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tests.support.cluster_loads import Loads
from tests.support.simulated_cluster import Arrival, Cluster, Setting, prefix_blind_balancer, real_balancer
from tokenmill_engine.config.engine import SchedulerConfig

Load = Callable[[Loads], Iterable[Arrival]]

SETTING = Setting()
SMALL = Setting(num_blocks=4_000, scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=1024))


def run(load: Load, setting: Setting = SETTING, output_len: int = 8, seed: int = 0) -> Cluster:
    cluster = Cluster(setting, real_balancer, seed).run(load(Loads(seed, output_len)))
    assert all(served.finished_s > 0.0 for served in cluster.served.values())
    for rank in cluster.ranks:
        rank.scheduler.check_invariants()
        assert rank.scheduler.num_unfinished == 0
    return cluster


def relative_hit_rate(load: Load, cluster: Cluster) -> float:
    return cluster.hit_rate / run(load, replace(cluster.setting, num_ranks=1)).hit_rate


@pytest.mark.slow
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(lambda loads: loads.at_once(loads.shared_prefixes()), id="at once"),
        pytest.param(lambda loads: loads.closed_loop(loads.shared_prefixes(), 256), id="256 clients"),
        pytest.param(lambda loads: loads.poisson(loads.shared_prefixes(), 60.0), id="60 a second"),
    ],
)
def test_shared_prefixes_are_found_as_on_one_rank_and_load_is_even(load: Load) -> None:
    """64 prefixes x 32 requests, shuffled, four ranks, four API servers."""
    cluster = run(load)
    assert relative_hit_rate(load, cluster) >= 0.97
    assert cluster.busiest_by_requests <= 1.15
    assert cluster.busiest_by_tokens <= 1.15


def test_a_few_shared_prefixes() -> None:
    def load(loads: Loads) -> Iterable[Arrival]:
        return loads.closed_loop(loads.shared_prefixes(16, 16, prefix_len=256, tail_len=32), 32)

    cluster = run(load, SMALL)
    assert relative_hit_rate(load, cluster) >= 0.9
    assert cluster.busiest_by_requests <= 1.25
    blind = Cluster(SMALL, prefix_blind_balancer).run(load(Loads(0, 8)))
    assert cluster.hit_rate > blind.hit_rate + 0.05


def test_a_system_prompt_comes_to_all_ranks() -> None:
    """At the price of one computation for each."""
    cluster = run(lambda loads: loads.poisson(loads.shared_prefixes(1, 512, prefix_len=512, tail_len=48), 100.0), SMALL)
    assert cluster.hit_rate >= 0.85
    counts = [sum(served.rank == rank for served in cluster.served.values()) for rank in range(4)]
    assert min(counts) >= 32


@pytest.mark.parametrize("prompt_len", [8, 400])
def test_prompts_that_share_nothing_are_spread(prompt_len: int) -> None:
    """Whether they come at once or one after the other, and nobody waits where others would not."""
    burst = run(lambda loads: loads.at_once(loads.own_prompts(64, prompt_len)), SMALL)
    assert burst.busiest_by_requests <= 1.15
    assert burst.needless_wait_s / 64 < 0.01
    steady = run(lambda loads: loads.poisson(loads.own_prompts(200, prompt_len), 30.0), SMALL)
    assert steady.busiest_by_requests <= 1.25
    assert max(steady.waits_s()) < 0.1


def test_a_prefix_that_everybody_sends_at_once_does_not_make_its_rank_full() -> None:
    """40 requests for 64 slots, from four API servers that have not heard of each other yet: none is left waiting
    until another is done."""
    cluster = run(lambda loads: loads.at_once(loads.shared_prefixes(1, 40, 256, 16)), SMALL, output_len=400)
    first_end = min(served.finished_s for served in cluster.served.values())
    assert max(served.admitted_s for served in cluster.served.values()) < first_end


def test_api_servers_do_not_rush_together_to_the_rank_that_reported_least() -> None:
    """A long burst without prefixes, so that all of them see the same loads again and again."""
    cluster = Cluster(SETTING, prefix_blind_balancer).run(Loads(0, 8).at_once(Loads(0, 8).own_prompts(512)))
    assert cluster.busiest_by_requests <= 1.05


def test_a_slow_rank_gets_less() -> None:
    slow = replace(SMALL, speeds=(1.0, 1.0, 1.0, 0.3))
    cluster = run(lambda loads: loads.closed_loop(loads.own_prompts(400, 400), 40), slow, output_len=16)
    counts = [sum(served.rank == rank for served in cluster.served.values()) for rank in range(4)]
    assert counts[3] < 0.75 * min(counts[:3])
    assert counts[3] > 0


def test_turns_of_a_chat_find_what_was_said() -> None:
    def load(loads: Loads) -> Iterable[Arrival]:
        return loads.chats(40, 4, rate=10.0, think_s=0.5, system_len=64, turn_len=100)

    cluster = run(load, SMALL)
    assert relative_hit_rate(load, cluster) >= 0.93
    assert cluster.busiest_by_requests <= 1.35
