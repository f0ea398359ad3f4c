"""Products with weight matrices on the GPU, each by the implementation that is fastest for its shape.

Few tokens: a matrix is read from memory once, and the streaming kernel does little else. Many: the vendor's library.
"""

import torch
from torch.nn import functional as F

from tokenmill_kernels.gpu.activation import silu_mul
from tokenmill_kernels.gpu.argmax import argmax
from tokenmill_kernels.gpu.linear_choice import Kind, Problem, StreamConfig, can_stream_dtype, choice_table, token_block
from tokenmill_kernels.gpu.linear_stream import can_stream, stream_argmax, stream_linear


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N] in `out_dtype`, or in x's dtype if that is None."""
    config = _stream_config("linear", x, weight)
    if config is not None:
        return stream_linear(x, weight, bias, config, out_dtype=out_dtype)
    if out_dtype is None or out_dtype == x.dtype:
        return F.linear(x, weight, bias)
    product = torch.mm(x, weight.t(), out_dtype=out_dtype)
    return product if bias is None else product.add_(bias)


def gated_linear(x: torch.Tensor, gate_up_weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up of gate | up = x [T, K] @ gate_up_weight [2I, K].T + bias [2I] -> [T, I]."""
    config = _stream_config("gated", x, gate_up_weight)
    if config is not None:
        return stream_linear(x, gate_up_weight, bias, config, gated=True)
    return silu_mul(linear(x, gate_up_weight, bias, None))


def linear_argmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Index of the largest entry of each row of x [T, K] @ weight [N, K].T in float32 -> int32 [T]; -1 where that is
    no finite number or the row has a NaN."""
    config = _stream_config("argmax", x, weight)
    if config is not None:
        return stream_argmax(x, weight, config)
    return argmax(linear(x, weight, None, torch.float32))


def _stream_config(kind: Kind, x: torch.Tensor, weight: torch.Tensor) -> StreamConfig | None:
    """Tiles of the streaming kernel where it takes the arguments and is faster than the library."""
    if not can_stream(x, weight) or not can_stream_dtype(x.dtype, x.device):
        return None
    problem = Problem(kind, weight.shape[0], weight.shape[1])
    return choice_table(x.device).choose(problem, token_block(x.shape[0]))
