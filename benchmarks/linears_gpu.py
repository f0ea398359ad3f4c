"""Times all matrix products of a decode step, at the shapes of an 8B and a 1B Llama, against what the card can do.

    python -m benchmarks.linears_gpu [--json FILE]

Each figure is the median over replays of one CUDA graph with the products of all layers and of the LM head in order,
every one with a weight of its own, and with what a step has between them: both norms, the activation, the argmax of the
logits. Attention is left out. The library's figure has the same small kernels around its products. The floor is the
bytes of the weights over the bandwidth of a device copy.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.kernels_gpu import DTYPE, ITEM_BYTES, copy_bandwidth, median_ms, print_table
from tokenmill_kernels import ops
from tokenmill_kernels.gpu.linear_library import library_argmax, library_gated_linear, library_linear

VOCAB_SIZE = 128256
NUM_TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)


Multiply = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of use, tokens and weight; the uses are those of `ops.prepare_linears`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    name: str
    num_layers: int
    hidden: int
    qkv: int
    intermediate: int

    def weights(self) -> tuple[list[tuple[torch.Tensor, ...]], torch.Tensor]:
        """Random matrices: qkv, attention output, gate and up, and down of each layer; and the head."""
        layers: list[tuple[torch.Tensor, ...]] = [
            (
                random_matrix(self.qkv, self.hidden),
                random_matrix(self.hidden, self.hidden),
                random_matrix(2 * self.intermediate, self.hidden),
                random_matrix(self.hidden, self.intermediate),
            )
            for _ in range(self.num_layers)
        ]
        return layers, random_matrix(VOCAB_SIZE, self.hidden)


SHAPES = (Shape("8B", 32, 4096, 6144, 14336), Shape("1B", 16, 2048, 3072, 8192))


def random_matrix(num_rows: int, k_size: int) -> torch.Tensor:
    """Numbers as small as weights are."""
    return torch.empty(num_rows, k_size, dtype=DTYPE, device="cuda").normal_(0, 0.02)


def ours(use: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What a step calls."""
    if use == "argmax":
        return ops.linear_argmax(x, weight)
    return ops.gated_linear(x, weight) if use == "gated" else ops.linear(x, weight)


def library(use: str, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same with products by the vendor's library."""
    if use == "argmax":
        return library_argmax(x, weight)
    return library_gated_linear(x, weight, None) if use == "gated" else library_linear(x, weight, None)


def step_ms(multiply: Multiply, layers: list[tuple[torch.Tensor, ...]], head: torch.Tensor, num_tokens: int) -> float:
    """Milliseconds of a step without attention."""
    hidden_size = head.shape[1]
    embedded = torch.randn(num_tokens, hidden_size, device="cuda").to(DTYPE)
    residual = torch.zeros_like(embedded)
    norm = torch.ones(hidden_size, dtype=DTYPE, device="cuda")

    def step() -> torch.Tensor:
        hidden = embedded
        for qkv, output, gate_up, down in layers:
            hidden = ops.add_rms_norm(hidden, residual, norm, 1e-5)[0]
            hidden = multiply("linear", multiply("linear", hidden, qkv)[:, :hidden_size], output)
            hidden = ops.add_rms_norm(hidden, residual, norm, 1e-5)[0]
            hidden = multiply("linear", multiply("gated", hidden, gate_up), down)
        return multiply("argmax", ops.add_rms_norm(hidden, residual, norm, 1e-5)[0], head)

    return median_ms([step])


def rows() -> Iterator[dict[str, object]]:
    """Every row of the table."""
    bandwidth = copy_bandwidth()
    yield {"op": "device copy", "gb_per_s": bandwidth / 1e9}
    for shape in SHAPES:
        layers, head = shape.weights()
        moved = sum(weight.numel() for weights in [*layers, (head,)] for weight in weights) * ITEM_BYTES
        for num_tokens in NUM_TOKENS:
            own = step_ms(ours, layers, head, num_tokens)
            yield {
                "op": f"{shape.name} linears, {num_tokens} tokens",
                "ms": own,
                "library_ms": step_ms(library, layers, head, num_tokens),
                "floor_ms": moved / bandwidth * 1e3,
                "gb_per_s": moved / own / 1e6,
            }


def formatted(row: dict[str, object]) -> str:
    """One line of the table; empty where a column has no meaning."""
    values = (row.get(name) for name in ("ms", "library_ms", "floor_ms"))
    text = "".join(" " * 9 if value is None else format(value, "9.3f") for value in values)
    return f"{row['op']!s:<28}{text}{row['gb_per_s']:7.0f}"


def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print_table(rows(), arguments.json, f"{'':<28}{'ms':>9}{'library':>9}{'floor':>9}{'GB/s':>7}\n", formatted)


if __name__ == "__main__":
    main()
