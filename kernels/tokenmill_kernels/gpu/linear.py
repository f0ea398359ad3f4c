"""Products with weight matrices on the GPU, each by the implementation that is fastest for its shape.

Few tokens: a matrix is read from memory once, and the streaming kernel does little else. Many: the vendor's library.
"""

from collections.abc import Iterable

import torch

from tokenmill_kernels.gpu import linear_tuning
from tokenmill_kernels.gpu.argmax import best_of_pieces, logit_pieces, reduce_pieces
from tokenmill_kernels.gpu.linear_choice import (
    Kind,
    Problem,
    StreamConfig,
    can_stream_dtype,
    choice_table,
    token_block,
)
from tokenmill_kernels.gpu.linear_library import library_gated_linear, library_linear
from tokenmill_kernels.gpu.linear_stream import can_stream, stream_linear, stream_pieces


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N] in `out_dtype`, or in x's dtype if that is None."""
    config = _stream_config("linear", x, weight)
    if config is None:
        return library_linear(x, weight, bias, out_dtype)
    return stream_linear(x, weight, bias, config, out_dtype=out_dtype)


def gated_linear(x: torch.Tensor, gate_up_weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of gate | up = x [T, K] @ gate_up_weight [2I, K].T + bias [2I] -> [T, I]."""
    config = _stream_config("gated", x, gate_up_weight)
    if config is None:
        return library_gated_linear(x, gate_up_weight, bias)
    return stream_linear(x, gate_up_weight, bias, config, gated=True)


def linear_argmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Index of the largest entry of each row of x [T, K] @ weight [N, K].T in float32 -> int32 [T]; -1 where that is
    no finite number or the row has a NaN."""
    return reduce_pieces(*_argmax_pieces(x, weight))


def linear_best(x: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """(largest entry, its index as `linear_argmax` has it, counted from `first`) of each row -> float32 [T, 2]."""
    return best_of_pieces(*_argmax_pieces(x, weight), first)


def _argmax_pieces(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config = _stream_config("argmax", x, weight)
    if config is None:
        return logit_pieces(library_linear(x, weight, None, torch.float32))
    return stream_pieces(x, weight, config)


def prepare(shapes: Iterable[tuple[Kind, int, int]], dtype: torch.dtype, device: torch.device) -> None:
    """Measures the shapes (use, N, K) that no table knows."""
    linear_tuning.prepare([Problem(*shape) for shape in shapes], dtype, device)


def _stream_config(kind: Kind, x: torch.Tensor, weight: torch.Tensor) -> StreamConfig | None:
    """Tiles of the streaming kernel where it takes the arguments and is faster than the library."""
    if not can_stream(x, weight) or not can_stream_dtype(x.dtype, x.device):
        return None
    problem = Problem(kind, weight.shape[0], weight.shape[1])
    return choice_table(x.device).choose(problem, token_block(x.shape[0]))
