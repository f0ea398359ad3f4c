"""What token budgets give on a simulated device: `python -m benchmarks.budgets`, from the root of the repository.

The engine core is the real one, its executor adds up the costs of an 8B model on an H100 as the card measured them at a
start, with 2 % of noise. Nothing of servers and clients is in the figures: they compare budgets, and predict no server.
With `--effects`, the default under what a loaded card and its host do beyond that, one after the other and together.
"""

import argparse
import logging
from collections.abc import Iterator

import numpy as np

from tests.support.simulated_device import EFFECTS, H100_8B_FLAT, NO_EFFECTS, ClosedLoop, Effects, gaussian_noise
from tokenmill_engine.config.engine import SchedulerConfig

_MAX_TOKENS = 8192
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_INPUT_LEN, _OUTPUT_LEN = 1024, 128
_TIMED_PROMPT = 256
"""Tokens of the prompts that a worker times at its start."""
_NUM_WARM_UPS = 32


def simulate(
    num_clients: int,
    num_requests: int,
    explicit: int | None = None,
    target_itl_ms: float | None = None,
    effects: Effects = NO_EFFECTS,
    num_warm_ups: int = 0,
) -> ClosedLoop:
    """A closed loop with an explicit budget, a target, or the default; `num_warm_ups` requests at once come first."""
    scheduler = SchedulerConfig(
        max_num_seqs=256,
        max_num_batched_tokens=explicit or _MAX_TOKENS,
        explicit_budget=explicit is not None,
        target_itl_ms=target_itl_ms,
    )
    loop = ClosedLoop(
        H100_8B_FLAT,
        scheduler,
        _INPUT_LEN,
        _OUTPUT_LEN,
        start_costs=H100_8B_FLAT.prefill_costs(_SIZES, _TIMED_PROMPT),
        noise=gaussian_noise(0.02),
        num_blocks=num_clients * 80,
        effects=effects,
    )
    return loop.run(num_warm_ups, num_warm_ups).run(num_clients, num_requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--requests-per-client", type=int, default=6)
    parser.add_argument("--budgets", type=int, nargs="*", default=[256, 512, 1024, 2048, 8192])
    parser.add_argument("--targets-ms", type=float, nargs="*", default=[15.0, 25.0, 40.0])
    parser.add_argument("--effects", action="store_true", help="the default under each effect, with the most clients")
    args = parser.parse_args()
    logging.disable()
    if args.effects:
        lines = _effects(max(args.clients), args.requests_per_client)
    else:
        policies: list[tuple[str, int | None, float | None]] = [("default", None, None)]
        policies += [(f"--max-num-batched-tokens {size}", size, None) for size in args.budgets]
        policies += [(f"--target-itl-ms {target:g}", None, target) for target in args.targets_ms]
        lines = _policies(args.clients, args.requests_per_client, policies)
    for line in lines:
        print(line, flush=True)  # noqa: T201 - the result of a benchmark


def _policies(
    clients: list[int], requests_per_client: int, policies: list[tuple[str, int | None, float | None]]
) -> Iterator[str]:
    """The table, of policies with (flags, budget, target)."""
    yield "| clients | flags | out tok/s | TTFT p50 ms | ITL p50 / p99 ms | tokens of a mixed step, median |"
    yield "|---|---|---|---|---|---|"
    for num_clients in clients:
        for name, explicit, target in policies:
            if explicit is not None and explicit < num_clients:
                continue
            loop = simulate(num_clients, num_clients * requests_per_client, explicit, target)
            size = np.median([plan.num_tokens for plan, _ in loop.mixed_steps()])
            yield f"| {num_clients} | {name} | {_figures(loop)} | {size:.0f} |"


def _effects(num_clients: int, requests_per_client: int) -> Iterator[str]:
    """The table of the default under each effect, beside an explicit budget of what it chooses at the start."""
    yield "| effect | out tok/s, with 1024 / 2048 | out tok/s | TTFT p50 ms | ITL p50 / p99 ms | budget at the end |"
    yield "|---|---|---|---|---|---|"
    for name, effects in EFFECTS.items():
        loops = [
            simulate(num_clients, num_clients * requests_per_client, explicit, None, effects, _NUM_WARM_UPS)
            for explicit in (1024, 2048, None)
        ]
        fixed = " / ".join(f"{loop.tokens_per_s:.0f}" for loop in loops[:2])
        yield f"| {name} | {fixed} | {_figures(loops[2])} | {loops[2].core._budget.mixed_tokens} |"


def _figures(loop: ClosedLoop) -> str:
    """Throughput, first tokens, gaps."""
    first = np.median([stream.token_times[0] - stream.arrived_s for stream in loop.streams.values()])
    middle, late = np.percentile(loop.gaps, (50, 99)) * 1e3
    return f"{loop.tokens_per_s:.0f} | {first * 1e3:.0f} | {middle:.1f} / {late:.1f}"


if __name__ == "__main__":
    main()
