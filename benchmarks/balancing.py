"""What balancing makes of loads on simulated ranks: `python -m benchmarks.balancing`, from the root of the repository.

Four data-parallel ranks of an 8B model on H100s behind four API servers, against one rank. Balancers, schedulers,
prefix caches and messages are the real ones; steps take what an H100 took, messages and API servers fixed times. The
figures compare ways of balancing, and predict no server.
"""

import argparse
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from tests.support.cluster_loads import Loads
from tests.support.simulated_cluster import Arrival, Cluster, Setting, prefix_blind_balancer, real_balancer

LOADS: dict[str, Callable[[Loads], Iterable[Arrival]]] = {
    "64 prefixes x 32, all at once": lambda loads: loads.at_once(loads.shared_prefixes()),
    "64 prefixes x 32, 256 clients": lambda loads: loads.closed_loop(loads.shared_prefixes(), 256),
    "64 prefixes x 32, 60 a second": lambda loads: loads.poisson(loads.shared_prefixes(), 60.0),
    "64 prefixes x 32, 20 a second": lambda loads: loads.poisson(loads.shared_prefixes(), 20.0),
    "nothing shared, all at once": lambda loads: loads.at_once(loads.own_prompts(1024)),
    "nothing shared, 60 a second": lambda loads: loads.poisson(loads.own_prompts(1024), 60.0),
    "one system prompt, all at once": lambda loads: loads.at_once(loads.shared_prefixes(1, 1024)),
    "one system prompt, 100 a second": lambda loads: loads.poisson(loads.shared_prefixes(1, 1024), 100.0),
    "200 chats of 5 turns": lambda loads: loads.chats(200, 5, rate=8.0, think_s=3.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--api-servers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="loads whose name contains this")
    args = parser.parse_args()
    logging.disable()
    setting = Setting(num_ranks=args.ranks, num_api_servers=args.api_servers)
    for line in _lines(setting, args.seed, [name for name in LOADS if args.only in name]):
        print(line, flush=True)  # noqa: T201 - the result of a benchmark


def _lines(setting: Setting, seed: int, names: list[str]) -> Iterator[str]:
    """The table. Needless: ms, per request, that it waited while another rank would have admitted it."""
    yield "| load | balancer | hit rate (to one rank's) | busiest: requests, tokens | wait p50 / p99 ms | needless |"
    yield "|---|---|---|---|---|---|"
    for name in names:
        alone = Cluster(replace(setting, num_ranks=1), real_balancer, seed).run(LOADS[name](Loads(seed)))
        for kind, balancer in (("prefix-aware", real_balancer), ("load only", prefix_blind_balancer)):
            cluster = Cluster(setting, balancer, seed).run(LOADS[name](Loads(seed)))
            ratio = f" ({cluster.hit_rate / alone.hit_rate:.3f})" if alone.hit_rate else ""
            middle, late = np.percentile(cluster.waits_s(), (50, 99)) * 1e3
            needless = cluster.needless_wait_s / len(cluster.served) * 1e3
            busiest = f"{cluster.busiest_by_requests:.2f}, {cluster.busiest_by_tokens:.2f}"
            yield (
                f"| {name} | {kind} | {cluster.hit_rate:.3f}{ratio} | {busiest} | "
                f"{middle:.1f} / {late:.1f} | {needless:.1f} |"
            )


if __name__ == "__main__":
    main()
