"""The kernels every model is built from, as plain functions. Backends: `gpu/` (Triton), `cpu/` (C++), `reference.py`.

Shapes: T tokens, R requests, H query heads, KH key/value heads, D head dimension, V vocabulary.
The KV cache of a layer is a pair of tensors, each a view [num_blocks, block_size, KH, D] with explicit strides
(storage order is num_blocks, KH, block_size, D; see `allocate_kv_cache`).

The device of the first argument chooses the backend. Activations, weights and cache of one call share a dtype
unless stated otherwise; arithmetic accumulates in float32. Matrices are row-major with contiguous rows.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal

import torch
from torch.nn import functional as F

from tokenmill_kernels import reference
from tokenmill_kernels.cpu import ops as cpu
from tokenmill_kernels.cpu.packed import PackedWeight
from tokenmill_kernels.gpu.attention_plan import AttentionPlan

__all__ = [
    "AttentionPlan",
    "PackedWeight",
    "add_rms_norm",
    "allocate_kv_cache",
    "embed_rms_norm",
    "embedding",
    "embedding_part",
    "gated_linear",
    "gather_rows",
    "linear",
    "linear_argmax",
    "linear_best",
    "pack_linear",
    "paged_attention",
    "pick_best",
    "plan_attention",
    "prepare_linears",
    "rms_norm",
    "rotary_kv_write",
    "rotate_rows",
    "silu_mul",
]


LinearUse = Literal["linear", "gated", "argmax"]
"""Of a weight: by `linear`, `gated_linear` or `linear_argmax`."""


@dataclass(slots=True, frozen=True)
class _GpuModules:
    norm: ModuleType
    gather: ModuleType
    activation: ModuleType
    rotary: ModuleType
    attention: ModuleType
    linear: ModuleType
    vocabulary: ModuleType


@cache
def _gpu() -> _GpuModules:
    """The Triton kernels, imported when the first CUDA tensor appears: machines without a GPU never pay for them."""
    from tokenmill_kernels.gpu import activation, attention, gather, linear, norm, rotary, vocabulary

    return _GpuModules(norm, gather, activation, rotary, attention, linear, vocabulary)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm of x [T, N] times weight [N] -> [T, N] (arXiv:1910.07467)."""
    if x.is_cuda:
        normed: torch.Tensor = _gpu().norm.rms_norm(x, weight, eps)
        return normed
    return cpu.rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual), each [T, N]; the norm goes to `out` [T, N] if that is given.
    `residual` may be overwritten with the sum."""
    if x.is_cuda:
        pair: tuple[torch.Tensor, torch.Tensor] = _gpu().norm.add_rms_norm(x, residual, weight, eps, out)
        return pair
    normed, total = cpu.add_rms_norm(x, residual, weight, eps)
    return normed if out is None else out.copy_(normed), total


def embed_rms_norm(
    ids: torch.Tensor, table: torch.Tensor | PackedWeight, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(rows), rows) for the rows ids [T] (as in `embedding`) of table [V, N], each [T, N]."""
    if isinstance(table, torch.Tensor) and table.is_cuda:
        pair: tuple[torch.Tensor, torch.Tensor] = _gpu().norm.embed_rms_norm(ids, table, weight, eps)
        return pair
    rows = embedding(ids, table)
    return rms_norm(rows, weight, eps), rows


def gather_rows(first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `rows` int32 [R] of first [T, N] and of second [T, M] -> [R, N], [R, M]. A negative row gives zeros."""
    if first.is_cuda:
        pair: tuple[torch.Tensor, torch.Tensor] = _gpu().gather.gather_rows(first, second, rows)
        return pair
    return reference.gather_rows(first, second, rows)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2I] = gate | up -> [T, I]."""
    if gate_up.is_cuda:
        product: torch.Tensor = _gpu().activation.silu_mul(gate_up)
        return product
    return cpu.silu_mul(gate_up)


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    k_scale: torch.Tensor | float | None = None,
    v_scale: torch.Tensor | float | None = None,
    early: bool = False,
) -> None:
    """Rotary embedding of q [T, H, D] and k [T, KH, D] in place (halves, as in GPT-NeoX), after an RMS norm per head
    when `q_norm`, `k_norm` [D] are given; then k and v [T, KH, D] go to the cache.

    q, k and v may be strided views of one [T, (H + 2 KH) * D] tensor. `cos_sin` is float32
    [max_position, rotary_dim], cosines in the first half of a row, sines in the second; dimensions past rotary_dim
    are left alone. `positions` int32 [T]. `slot_mapping` int64 [T]: block * block_size + offset, -1 writes nothing.
    The cache may be float8_e4m3fn; it takes k / k_scale and v / v_scale (floats, float32 tensors of one element, or
    None for 1), and the largest e4m3 number for what is larger. `early` promises that the launch right before this
    one writes none of `cos_sin`, `positions` and `slot_mapping`: CUDA may then read them before that one is done.
    """
    inputs = (q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache, q_norm, k_norm, eps)
    if q.is_cuda:
        _gpu().rotary.rotary_kv_write(*inputs, k_scale=k_scale, v_scale=v_scale, early=early)
    else:
        cpu.rotary_kv_write(*inputs, k_scale=k_scale, v_scale=v_scale)


def rotate_rows(
    q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [T, H, D] turned by halves (as in GPT-NeoX), row t by the angles whose cosines and sines are row t of
    float32 [T, D / 2]. q and k may be overwritten, and may be strided views of one tensor."""
    if q.is_cuda:
        _gpu().rotary.rotate_rows(q, k, cosines, sines)
        return q, k
    return reference.rotate_rows(q, k, cosines, sines)


def plan_attention(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    num_decodes: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    window: int | None,
) -> AttentionPlan | None:
    """How the attention of a step is divided, for every layer with these heads and this window; None on CPU.

    `num_tokens` counts the rows of q, padding included, `dtype` is q's; the rest is as in `paged_attention`. The work
    list is built on the device, so a captured graph serves any lengths within its padded sizes.
    """
    if not query_start_loc.is_cuda:
        return None
    plan: AttentionPlan = _gpu().attention.plan_attention(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        max_query_len=max_query_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        window=window,
    )
    return plan


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_decodes: int,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> torch.Tensor:
    """Causal attention of every request's new tokens, q [T, H, D], over its cached keys and values -> [T, H, D].

    Request r owns rows query_start_loc[r] : query_start_loc[r + 1] (int32 [R + 1]); they are the last ones of its
    seq_lens[r] (int32 [R]) tokens, all of which are in the cache already, in the blocks block_tables[r]
    (int32 [R, max_blocks]). A query at position p sees keys j with p - window < j <= p. With `soft_cap` c a scaled
    score s becomes c * tanh(s / c). The first `num_decodes` requests have one token each; `max_query_len` and
    `max_seq_len` are upper bounds. Requests of length 0 are padding; rows that no request owns are undefined.
    The cache may hold float8_e4m3fn: then keys and values are what it holds times `k_scale` and `v_scale`, each one
    number, or a float32 tensor on the device [1] or [KH]. `plan` is what `plan_attention` made of the same arguments,
    at least two launches ago on this stream; without one, CUDA makes it on the spot.
    """
    batch: dict[str, Any] = {
        "query_start_loc": query_start_loc,
        "seq_lens": seq_lens,
        "block_tables": block_tables,
        "num_decodes": num_decodes,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "scale": scale,
        "window": window,
        "soft_cap": soft_cap,
        "out": out,
    }
    if q.is_cuda:
        attended: torch.Tensor = _gpu().attention.paged_attention(
            q, k_cache, v_cache, **batch, k_scale=k_scale, v_scale=v_scale, plan=plan
        )
        return attended
    if k_scale is not None or v_scale is not None or k_cache.dtype != q.dtype:
        return reference.paged_attention(q, k_cache, v_cache, **batch, k_scale=k_scale, v_scale=v_scale)
    return cpu.paged_attention(q, k_cache, v_cache, **batch)


def embedding(ids: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Rows ids [T] (int32 or int64, in range) of weight [V, N] -> [T, N]. Packed, it may be the LM head too."""
    return cpu.embedding(ids, weight) if isinstance(weight, PackedWeight) else F.embedding(ids, weight)


def embedding_part(ids: torch.Tensor, weight: torch.Tensor | PackedWeight, first: int) -> torch.Tensor:
    """Rows ids [T] (int32) minus `first` of weight [V, N] -> [T, N], zeros for those that are not in it."""
    if ids.is_cuda:
        rows: torch.Tensor = _gpu().vocabulary.embedding_part(ids, _plain(weight), first)
        return rows
    places = ids - first
    is_elsewhere = (places < 0) | (places >= weight.shape[0])
    return embedding(places.clamp(0, weight.shape[0] - 1), weight).masked_fill(is_elsewhere[:, None], 0)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias [N] -> [T, N], in x's dtype or in float32 when `out_dtype` says so.

    A float32 product is never rounded to x's dtype on its way. On CUDA nothing may run beside it on another stream
    that calls any of the linear functions.
    """
    if x.is_cuda:
        product: torch.Tensor = _gpu().linear.linear(x, _plain(weight), bias, out_dtype)
        return product
    return cpu.linear(x, weight, bias, out_dtype=out_dtype)


def gated_linear(
    x: torch.Tensor, gate_up_weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(gate) * up of gate | up = x [T, K] @ gate_up_weight [2I, K].T + bias [2I] -> [T, I].

    With few tokens on CUDA the halves are not rounded to x's dtype before they are multiplied.
    """
    if x.is_cuda:
        product: torch.Tensor = _gpu().linear.gated_linear(x, _plain(gate_up_weight), bias)
        return product
    return silu_mul(linear(x, gate_up_weight, bias))


def linear_argmax(x: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Index of the largest entry of each row of x [T, K] @ weight [V, K].T -> int32 [T].

    Of equal entries the lowest index wins. A row with a NaN gives -1; on CUDA one whose largest entry is infinite too.
    On CUDA and with a packed weight the product is compared in float32, otherwise in x's dtype; it is not stored where
    few tokens or a packed weight allow it.
    """
    if x.is_cuda:
        indices: torch.Tensor = _gpu().linear.linear_argmax(x, _plain(weight))
        return indices
    return cpu.linear_argmax(x, weight).to(torch.int32)


def linear_best(x: torch.Tensor, weight: torch.Tensor | PackedWeight, first: int) -> torch.Tensor:
    """Each row's largest entry of x [T, K] @ weight [V, K].T and `first` plus its index as `linear_argmax` has it, or
    -1 -> float32 [T, 2], which counts far enough for any vocabulary."""
    if x.is_cuda:
        pairs: torch.Tensor = _gpu().linear.linear_best(x, _plain(weight), first)
        return pairs
    best = linear_argmax(x, weight)
    scores = (x.float() * embedding(best.clamp(min=0), weight).float()).sum(dim=-1)
    return torch.stack((scores, torch.where(best < 0, best, best + first).float()), dim=-1)


def pick_best(pairs: torch.Tensor) -> torch.Tensor:
    """Of what `linear_best` gives for M parts of a weight, float32 [T, M, 2], the index with the largest entry, of
    equal ones that of the first part -> int32 [T]; -1 if one of the parts has -1."""
    if pairs.is_cuda:
        indices: torch.Tensor = _gpu().vocabulary.pick_best(pairs)
        return indices
    scores, found = pairs.unbind(dim=-1)
    winners = found.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    return winners.masked_fill((found < 0).any(dim=1), -1).to(torch.int32)


def prepare_linears(shapes: Iterable[tuple[LinearUse, int, int]], dtype: torch.dtype, device: torch.device) -> None:
    """Lets the linear functions choose well for weights of `shapes`: (use, N, K). On CUDA, measures those whose fastest
    implementation on this card is not known yet, and keeps the results for later processes. Not during a capture."""
    if device.type == "cuda":
        _gpu().linear.prepare(shapes, dtype, device)


def _plain(weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    if isinstance(weight, PackedWeight):
        raise TypeError("a packed weight is for the CPU; CUDA takes the plain matrix")
    return weight


def pack_linear(weight: torch.Tensor) -> torch.Tensor | PackedWeight:
    """`weight` [N, K] in the form that `linear` likes best on its device; the original may be freed afterwards."""
    return weight if weight.is_cuda else cpu.pack_linear(weight)


def allocate_kv_cache(
    num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed key and value caches of one layer, each a view [num_blocks, block_size, num_kv_heads, head_dim].

    Rows of one head in one block are contiguous in memory: kernels walk a head's keys in long runs.
    """
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    if torch.device(device).type == "cpu":
        keys, values = (cpu.allocate(math.prod(shape), dtype).view(shape) for _ in range(2))
    else:
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    return keys.transpose(1, 2), values.transpose(1, 2)
