"""Random inputs of the kernels, poisoned wherever a kernel must not look, and how results are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill_kernels import ops

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative error of a whole result against the reference, float32 inside and rounded once."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| over all elements; NaN if any is, 0 if all are 0."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm().clamp(min=1e-30))


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape and dtype, and within the tolerance of the dtype (a NaN never is)."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    error = relative_error(actual, expected)
    assert error <= TOLERANCE[expected.dtype], f"relative error {error:.2e}"


def poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor of NaN of the dtype and device of `like`."""
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


@dataclass(frozen=True, slots=True)
class PagedShape:
    """Heads and cache of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """That of q unless given."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Arguments of `paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    lengths: dict[str, Any]
    """Keyword arguments that say who owns what."""


def paged_batch(
    shape: PagedShape,
    requests: Sequence[tuple[int, int]],
    *,
    padding: int = 0,
    device: str = "cpu",
    num_decodes: int | None = None,
) -> PagedBatch:
    """A batch of (new tokens, total tokens) pairs, single tokens first, and `padding` requests of length 0.

    Blocks are scattered over the cache; rows that belong to nobody hold NaN. q is a strided view of a wider tensor, as
    if cut from a fused projection.
    """
    query_lens, seq_lens = [query for query, _ in requests], [total for _, total in requests]
    num_blocks = [-(-total // shape.block_size) for total in seq_lens]
    scattered = (torch.randperm(sum(num_blocks) + 2)[: sum(num_blocks)]).int().split(num_blocks)
    block_tables = torch.zeros(len(requests) + padding, max(num_blocks) + 1, dtype=torch.int32)
    cache_dtype = shape.cache_dtype or shape.dtype
    k_cache, v_cache = ops.allocate_kv_cache(
        sum(num_blocks) + 2, shape.block_size, shape.num_kv_heads, shape.head_dim, cache_dtype, device
    )
    for cache in (k_cache, v_cache):
        cache.copy_(torch.full((), float("nan")))
    for row, (blocks, total) in enumerate(zip(scattered, seq_lens, strict=True)):
        block_tables[row, : len(blocks)] = blocks
        slots = torch.arange(total)
        rows = (blocks[slots // shape.block_size].long().to(device), (slots % shape.block_size).to(device))
        for cache in (k_cache, v_cache):
            values = torch.randn(total, shape.num_kv_heads, shape.head_dim, device=device)
            _indexable(cache)[rows] = _indexable(values.to(cache_dtype))
    starts = torch.tensor([0, *query_lens, *[0] * padding]).cumsum(0).int()
    return PagedBatch(
        q=fused_qkv(shape, sum(query_lens), device)[0],
        k_cache=k_cache,
        v_cache=v_cache,
        lengths={
            "query_start_loc": starts.to(device),
            "seq_lens": torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32, device=device),
            "block_tables": block_tables.to(device),
            "num_decodes": query_lens.count(1) if num_decodes is None else num_decodes,
            "max_query_len": max(query_lens),
            "max_seq_len": max(seq_lens),
        },
    )


def _indexable(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of 8-bit floats, which not every device indexes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def fused_qkv(shape: PagedShape, num_tokens: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """q, k and v as views of one random projection [num_tokens, (H + 2 KH) D]."""
    sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
    wide = torch.randn(num_tokens, sum(sizes) * shape.head_dim, device=device).to(shape.dtype)
    return wide.view(num_tokens, sum(sizes), shape.head_dim).split(sizes, dim=1)


def cos_sin_table(num_positions: int, rotary_dim: int, device: str = "cpu") -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines, then sines, of the default rotary embedding."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(num_positions).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
