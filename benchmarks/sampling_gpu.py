"""Times the sampling kernels on rows of a vocabulary of 128256.

    python -m benchmarks.sampling_gpu [--json FILE]

Figures are medians over replays of a CUDA graph that walks several sets of logits. The floor is one read of the logits.
Logits are normal numbers: flat ones, as dummy weights give, where top_p keeps most of the vocabulary, and peaked ones.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.kernels_gpu import copy_bandwidth, median_ms, num_sets, print_table
from tokenmill_kernels import sampling_columns as columns
from tokenmill_kernels.gpu.argmax import argmax
from tokenmill_kernels.gpu.sampling import SamplingTables, Workspace, choose_tokens
from tokenmill_kernels.gpu.sampling_penalties import allocate_counters, apply_penalties
from tokenmill_kernels.gpu.sampling_scores import score

VOCAB_SIZE = 128_256
NUM_ROWS = (1, 8, 32, 128, 256)
SPREADS = {"flat": 1.0, "peaked": 3.0}
PENALIZED_TOKENS = (1024, 16_384)
NUM_TOP = (0, 5, 20)

Call = Callable[[torch.Tensor], object]
"""Does something with logits."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Those of all rows."""

    top_k: int = VOCAB_SIZE
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0


FILTERS = {
    "temperature": Parameters(),
    "top_p 0.9": Parameters(top_p=0.9),
    "top_k 50": Parameters(top_k=50),
    "top_k 50, top_p 0.9": Parameters(top_k=50, top_p=0.9),
    "min_p 0.05": Parameters(min_p=0.05),
    "top_k 5000": Parameters(top_k=5000),
}


def make_tables(num_rows: int, parameters: Parameters, num_tokens: int = 1) -> SamplingTables:
    """Equal requests in as many slots, with random tokens; half of them are the prompt."""
    values = {
        columns.TEMPERATURE: 1.0,
        columns.TOP_P: parameters.top_p,
        columns.MIN_P: parameters.min_p,
        columns.REPETITION: parameters.repetition,
    }
    floats = torch.zeros(num_rows, columns.NUM_FLOATS)
    for column, value in values.items():
        floats[:, column] = value
    integers = torch.arange(num_rows)[:, None].repeat(1, columns.NUM_INTEGERS)
    integers[:, columns.TOP_K] = parameters.top_k
    counts = torch.full((num_rows,), num_tokens, dtype=torch.int32, device="cuda")
    token_ids = torch.randint(0, VOCAB_SIZE, (num_rows, num_tokens), dtype=torch.int32, device="cuda")
    return SamplingTables(floats.cuda(), integers.cuda(), token_ids, counts, counts // 2)


def choices(num_rows: int) -> Iterator[tuple[str, Call]]:
    """Name and call of every way to choose tokens."""
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    workspace = Workspace(num_rows, VOCAB_SIZE, slots.device)
    yield "greedy", argmax
    for name, parameters in FILTERS.items():
        tables, filtered = make_tables(num_rows, parameters), parameters != Parameters()
        yield (
            name,
            partial(choose_tokens, slots=slots, tables=tables, workspace=workspace, random=True, filtered=filtered),
        )


def other_calls(num_rows: int) -> Iterator[tuple[str, Call]]:
    """Name and call of what depends little on the logits."""
    slots = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    counters = allocate_counters(num_rows, VOCAB_SIZE, slots.device)
    for num_tokens in PENALIZED_TOKENS:
        tables = make_tables(num_rows, Parameters(repetition=1.1), num_tokens)
        yield (
            f"penalties of {num_tokens} tokens",
            partial(apply_penalties, slots=slots, tables=tables, counters=counters),
        )
    own = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    for num_top in NUM_TOP:
        yield f"log-probabilities, {num_top} most likely", partial(score, own=own, num_top=num_top)


def rows() -> Iterator[dict[str, object]]:
    """Every row of the table, in order."""
    bandwidth = copy_bandwidth()
    for num_rows in NUM_ROWS:
        num_bytes = num_rows * VOCAB_SIZE * 4
        for kind, spread in SPREADS.items():
            sets = [torch.randn(num_rows, VOCAB_SIZE, device="cuda") * spread for _ in range(num_sets(num_bytes))]
            calls = [*choices(num_rows), *(other_calls(num_rows) if kind == "flat" else ())]
            for name, call in calls:
                milliseconds = median_ms([partial(call, logits) for logits in sets])
                yield {
                    "op": f"{name}, {num_rows} {kind} rows",
                    "ms": milliseconds,
                    "floor_ms": None if name.startswith("penalties") else num_bytes / bandwidth * 1e3,
                }


def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print_table(rows(), arguments.json)


if __name__ == "__main__":
    main()
