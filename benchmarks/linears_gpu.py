"""Times all matrix products of a decode step, at the shapes of an 8B and a 1B Llama, against what the card can do.

    python benchmarks/linears_gpu.py [--json FILE]

Each figure is the median over replays of one CUDA graph with the products of all layers and of the LM head in order,
every one with a weight of its own. Ours includes the activation of gate and up and the argmax of the logits; the
library's (cuBLAS) does not. The floor is the bytes of the weights over the bandwidth of a device copy.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from kernels_gpu import DTYPE, ITEM_BYTES, copy_bandwidth, median_ms
from torch.nn import functional as F

from tokenmill_kernels import ops

VOCAB_SIZE = 128256
NUM_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Shape:
    """Matrices of a model: use, rows and columns of those of one layer, and of the head."""

    name: str
    num_layers: int
    layer: tuple[tuple[str, int, int], ...]
    head: tuple[str, int, int]

    @property
    def matrices(self) -> list[tuple[str, int, int]]:
        """In the order of a step."""
        return [*self.layer * self.num_layers, self.head]


SHAPES = (
    Shape(
        "8B", 32,
        (("linear", 6144, 4096), ("linear", 4096, 4096), ("gated", 28672, 4096), ("linear", 4096, 14336)),
        ("argmax", VOCAB_SIZE, 4096),
    ),
    Shape(
        "1B", 16,
        (("linear", 3072, 2048), ("linear", 2048, 2048), ("gated", 16384, 2048), ("linear", 2048, 8192)),
        ("argmax", VOCAB_SIZE, 2048),
    ),
)  # fmt: skip


def ours(use: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a step calls."""
    if use == "argmax":
        return ops.linear_argmax(x, weight)
    return ops.gated_linear(x, weight) if use == "gated" else ops.linear(x, weight)


def library(use: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product alone."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32) if use == "argmax" else F.linear(x, weight)


def step_ms(
    multiply: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor],
    shape: Shape,
    weights: list[torch.Tensor],
    num_tokens: int,
) -> float:
    """Milliseconds of all products of a step."""
    inputs = {k: torch.randn(num_tokens, k, device="cuda").to(DTYPE) for _, _, k in shape.matrices}

    def step() -> None:
        for (use, _, k_size), weight in zip(shape.matrices, weights, strict=True):
            multiply(use, inputs[k_size], weight)

    return median_ms([step])


def rows() -> Iterator[dict[str, object]]:
    """Every row of the table."""
    bandwidth = copy_bandwidth()
    yield {"op": "device copy", "gb_per_s": bandwidth / 1e9}
    for shape in SHAPES:
        weights = [
            torch.empty(num_rows, k_size, dtype=DTYPE, device="cuda").normal_(0, 0.02)
            for _, num_rows, k_size in shape.matrices
        ]
        moved = sum(weight.numel() for weight in weights) * ITEM_BYTES
        for num_tokens in NUM_TOKENS:
            own = step_ms(ours, shape, weights, num_tokens)
            yield {
                "op": f"{shape.name} linears, {num_tokens} tokens",
                "ms": own,
                "library_ms": step_ms(library, shape, weights, num_tokens),
                "floor_ms": moved / bandwidth * 1e3,
                "gb_per_s": moved / own / 1e6,
            }


def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    sys.stdout.write(f"{'':<28}{'ms':>9}{'library':>9}{'floor':>9}{'GB/s':>7}\n")
    table = []
    for row in rows():
        table.append(row)
        cells = ((row.get("ms"), "9.3f"), (row.get("library_ms"), "9.3f"), (row.get("floor_ms"), "9.3f"))
        text = "".join(" " * 9 if value is None else format(value, form) for value, form in cells)
        sys.stdout.write(f"{row['op']!s:<28}{text}{row['gb_per_s']:7.0f}\n")
        sys.stdout.flush()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"card": torch.cuda.get_device_name(), "rows": table}, indent=1))


if __name__ == "__main__":
    main()
