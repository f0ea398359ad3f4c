"""Launches the weight-streaming kernel of `linear_kernels`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass
from functools import cache

import torch
import triton

from tokenmill_kernels.gpu.argmax import reduce_pieces
from tokenmill_kernels.gpu.launch import device_limits, launch_options
from tokenmill_kernels.gpu.linear_choice import MAX_PARTIALS, TOKEN_BLOCKS, StreamConfig, token_block
from tokenmill_kernels.gpu.linear_kernels import stream_kernel

_ALIGNMENT_BYTES = 16
_MAX_ROWS = 1 << 20
_MAX_TILES = 1 << 17


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch memory of the launches on one device."""

    partials: torch.Tensor
    """float32 [MAX_PARTIALS]"""
    arrivals: torch.Tensor
    """int32 [_MAX_TILES], all 0 between launches"""


@cache
def workspace(device: torch.device) -> Workspace:
    """Scratch memory of a device, shared by all launches: they must not run side by side on several streams."""
    partials = torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device)
    return Workspace(partials, torch.zeros(_MAX_TILES, dtype=torch.int32, device=device))


def can_stream(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes x [T, K] and weight [N, K]: few tokens, contiguous rows that begin at 16 bytes."""
    aligned = weight.data_ptr() % _ALIGNMENT_BYTES == 0 and weight.shape[1] * weight.itemsize % _ALIGNMENT_BYTES == 0
    fits = 0 < x.shape[0] <= TOKEN_BLOCKS[-1] and weight.shape[0] <= _MAX_ROWS
    return fits and aligned and x.stride(1) == 1 and weight.is_contiguous()


def stream_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: StreamConfig,
    *,
    out_dtype: torch.dtype | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N]; gated, silu of the first half times the second -> [T, N / 2].

    `can_stream` must hold. Accumulates in float32 and rounds once.
    """
    num_outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = torch.empty((x.shape[0], num_outputs), dtype=out_dtype or x.dtype, device=x.device)
    _launch(out, None, x, weight, bias, config, gated)
    return out


def stream_argmax(x: torch.Tensor, weight: torch.Tensor, config: StreamConfig) -> torch.Tensor:
    """Index of the largest entry of each row of x [T, K] @ weight [N, K].T, which is not stored -> int32 [T].

    The lowest index of equals; -1 for a row whose largest entry is no finite number or that has a NaN.
    """
    return reduce_pieces(*stream_pieces(x, weight, config))


def stream_pieces(x: torch.Tensor, weight: torch.Tensor, config: StreamConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """What `reduce_pieces` takes, of x [T, K] @ weight [N, K].T."""
    num_tokens = x.shape[0]
    shape = (token_block(num_tokens), _runs(weight.shape[0], weight.shape[1], config, x.device)[0])
    values = torch.empty(shape, dtype=torch.float32, device=x.device)
    indices = torch.empty(shape, dtype=torch.int32, device=x.device)
    _launch(values, indices, x, weight, None, config, gated=False)
    return values[:num_tokens], indices[:num_tokens]


def _runs(num_rows: int, k_size: int, config: StreamConfig, device: torch.device) -> tuple[int, int]:
    """(programs, granule in units): every program has a granule, for one without would hold up those that wait for it;
    as many as the card takes at once, or fewer with equal shares."""
    k_tiles = triton.cdiv(k_size, config.block_k)
    granule = max(k_tiles // config.cuts, 1) if config.cuts else 1
    if k_tiles % granule:
        granule = 1
    granules = triton.cdiv(num_rows, config.block_n) * (k_tiles // granule)
    shares = triton.cdiv(granules, device_limits(device).num_sms * config.programs_per_sm)
    return (triton.cdiv(granules, shares), granule)


def _launch(
    out: torch.Tensor,
    best_index: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    config: StreamConfig,
    gated: bool,
) -> None:
    """`out` is the product, or with `best_index` the scratch of the argmax, as `stream_kernel` says."""
    scratch = workspace(x.device)
    num_rows, k_size = weight.shape
    num_programs, granule = _runs(num_rows, k_size, config, x.device)
    block_t = token_block(x.shape[0])
    assert 2 * num_programs * config.block_n * block_t <= MAX_PARTIALS, f"{config} needs too much scratch memory"
    assert triton.cdiv(num_rows, config.block_n) <= _MAX_TILES, f"{config} has too many tiles"
    stream_kernel[(num_programs,)](
        out,
        best_index,
        x,
        weight,
        bias,
        scratch.partials,
        scratch.arrivals,
        x.shape[0],
        num_rows // 2 if gated else num_rows,
        k_size,
        x.stride(0),
        out.stride(0),
        config.ahead if k_size >= config.block_k else 0,
        granule,
        gated=gated,
        block_n=config.block_n,
        block_k=config.block_k,
        block_t=block_t,
        even_k=k_size % config.block_k == 0,
        parts=max(config.num_warps * 32 // config.block_n, 1),
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        **launch_options(x.device),
    )
