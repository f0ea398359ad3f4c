"""The kernels for CPU tensors, with the signatures of `tokenmill_kernels.ops`.

Whatever the C++ library does not take (float16, odd head sizes, no compiler on the machine) goes to PyTorch operators.
"""

import torch
from torch.nn import functional as F

from tokenmill_kernels import reference
from tokenmill_kernels.cpu.library import (
    DTYPE_CODES,
    AttentionBatchStruct,
    AttentionShapeStruct,
    AttentionStruct,
    CacheStruct,
    HeadsStruct,
    LinearStruct,
    RotaryStruct,
    check,
    load,
)
from tokenmill_kernels.cpu.packed import PackedWeight, allocate, can_pack, pack

__all__ = [
    "add_rms_norm",
    "allocate",
    "embedding",
    "linear",
    "linear_argmax",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rotary_kv_write",
    "silu_mul",
]

MAX_HEAD_DIM = 512
MAX_GROUP = 64
"""Query heads per KV head that the library's attention takes."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the rows of x [T, N]."""
    library = load()
    if library is None or not _same_rows(x) or not _same_vectors(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    library.tokenmill_rms_norm(
        DTYPE_CODES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), out.data_ptr(), *x.shape, eps
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual); the sum overwrites `residual`."""
    library = load()
    if library is None or not _same_rows(x, residual) or not _same_vectors(x, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty(x.shape, dtype=x.dtype)
    library.tokenmill_add_rms_norm(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        *x.shape,
        eps,
    )
    return out, residual


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2I] -> [T, I]."""
    library = load()
    if library is None or not _same_rows(gate_up):
        return reference.silu_mul(gate_up)
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype)
    library.tokenmill_silu_mul(
        DTYPE_CODES[gate_up.dtype], gate_up.data_ptr(), gate_up.stride(0), out.data_ptr(), num_rows, size
    )
    return out


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
) -> None:
    """Normalises and rotates q and k in place, writes k and v to the cache."""
    library = load()
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    fits = (
        library is not None
        and k_scale is None
        and v_scale is None
        and _same_heads(q, k, v, k_cache, v_cache)
        and q.shape[2] <= MAX_HEAD_DIM
        and all(norm.dtype == q.dtype and norm.is_contiguous() for norm in norms)
        and _is_plain(cos_sin, torch.float32)
        and _is_plain(positions, torch.int32)
        and _is_plain(slot_mapping, torch.int64)
    )
    if library is None or not fits:
        inputs = (q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache)
        reference.rotary_kv_write(*inputs, q_norm, k_norm, eps, k_scale=k_scale, v_scale=v_scale)
        return
    rotary = RotaryStruct(
        q=heads_struct(q),
        k=heads_struct(k),
        v=heads_struct(v),
        keys=cache_struct(k_cache),
        values=cache_struct(v_cache),
        cos_sin=cos_sin.data_ptr(),
        positions=positions.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        eps=eps,
        rotary_dim=cos_sin.shape[1],
        num_tokens=q.shape[0],
    )
    library.tokenmill_rotary_kv_write(DTYPE_CODES[q.dtype], _attention_shape(q, k_cache), rotary)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [T, H, D] over the paged cache. Work is divided by the true lengths: the hints are not needed."""
    library = load()
    fits = (
        library is not None
        and _same_heads(q, k_cache, v_cache)
        and attention_fits(q.shape[1], k_cache.shape[2], q.shape[2])
        and (out is None or _same_heads(q, out))
        and _is_plain(query_start_loc, torch.int32)
        and _is_plain(seq_lens, torch.int32)
        and block_tables.dtype == torch.int32
        and block_tables.stride(1) == 1
    )
    if library is None or not fits:
        return reference.paged_attention(
            q,
            k_cache,
            v_cache,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            out=out,
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype)
    attention = AttentionStruct(
        q=heads_struct(q),
        out=heads_struct(out),
        keys=cache_struct(k_cache),
        values=cache_struct(v_cache),
        scale=scale,
        soft_cap=soft_cap or 0.0,
        window=window or 0,
    )
    batch = batch_struct(query_start_loc, seq_lens, block_tables)
    status = library.tokenmill_paged_attention(DTYPE_CODES[q.dtype], _attention_shape(q, k_cache), batch, attention)
    check(status)
    return out


def embedding(ids: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Rows ids [T] of weight [V, N]."""
    if not isinstance(weight, PackedWeight):
        return F.embedding(ids, weight)
    library = load()
    assert library is not None, "packed weights come from the library"
    wide = ids.to(torch.int64).contiguous()
    out = torch.empty((*ids.shape, weight.in_features), dtype=weight.dtype)
    library.tokenmill_packed_rows(
        DTYPE_CODES[weight.dtype],
        weight.data.data_ptr(),
        weight.in_features,
        wide.data_ptr(),
        wide.numel(),
        out.data_ptr(),
    )
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, K] @ weight [N, K].T + bias."""
    if not isinstance(weight, PackedWeight):
        product = F.linear(x, weight, bias)
        return product if out_dtype is None else product.to(out_dtype)
    x = _whole_units(x)
    out = torch.empty((x.shape[0], weight.out_features), dtype=out_dtype or x.dtype)
    arguments = _linear_struct(x, weight, out)
    if bias is not None:
        bias = bias.to(x.dtype).contiguous()
        arguments.bias = bias.data_ptr()
    library = load()
    assert library is not None, "packed weights come from the library"
    library.tokenmill_linear(arguments)
    return out


def linear_argmax(x: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    """Argmax of each row of the product, -1 for a row with a NaN."""
    if not isinstance(weight, PackedWeight):
        logits = F.linear(x, weight)
        best = logits.argmax(dim=-1)
        return torch.where(logits.isnan().any(dim=-1), -1, best)
    x = _whole_units(x)
    out = torch.empty(x.shape[0], dtype=torch.int64)
    arguments = _linear_struct(x, weight, out)
    library = load()
    assert library is not None, "packed weights come from the library"
    check(library.tokenmill_linear_argmax(arguments))
    return out


def pack_linear(weight: torch.Tensor) -> torch.Tensor | PackedWeight:
    """The matrix packed for the library, or itself where the library is absent or does not take its type."""
    return pack(weight) if can_pack(weight.dtype, weight.shape[1]) else weight


def attention_fits(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether the library's attention takes these heads."""
    return head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM and num_heads // num_kv_heads <= MAX_GROUP


def heads_struct(heads: torch.Tensor) -> HeadsStruct:
    """Strides of [T, H, D]."""
    return HeadsStruct(data=heads.data_ptr(), token_stride=heads.stride(0), head_stride=heads.stride(1))


def cache_struct(cache: torch.Tensor) -> CacheStruct:
    """Strides of [num_blocks, block_size, KH, D]."""
    block, row, head, _ = cache.stride()
    return CacheStruct(data=cache.data_ptr(), block_stride=block, row_stride=row, head_stride=head)


def batch_struct(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_tables: torch.Tensor
) -> AttentionBatchStruct:
    """The requests of a step; the tensors must outlive the struct."""
    return AttentionBatchStruct(
        query_start_loc=query_start_loc.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_tables=block_tables.data_ptr(),
        table_stride=block_tables.stride(0),
        num_requests=seq_lens.shape[0],
    )


def _attention_shape(q: torch.Tensor, cache: torch.Tensor) -> AttentionShapeStruct:
    return AttentionShapeStruct(
        num_heads=q.shape[1], num_kv_heads=cache.shape[2], head_dim=q.shape[2], block_size=cache.shape[1]
    )


def _linear_struct(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor) -> LinearStruct:
    """Everything but the bias, for an x that `_whole_units` let through.

    Raises:
        TypeError: x's type or width is not the weight's.
    """
    if x.dtype != weight.dtype or x.dim() != 2 or x.shape[1] != weight.in_features:
        raise TypeError(
            f"a packed {weight.dtype} matrix {list(weight.shape)} does not take x {list(x.shape)} of {x.dtype}"
        )
    return LinearStruct(
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=weight.data.data_ptr(),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        num_rows=x.shape[0],
        in_features=weight.in_features,
        out_features=weight.out_features,
        dtype=DTYPE_CODES[x.dtype],
        out_dtype=DTYPE_CODES.get(out.dtype, 0),
    )


def _whole_units(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where its rows are not contiguous or begin at odd places: the library reads 32 bits at a time."""
    return x if x.stride(-1) == 1 and x.stride(0) * x.itemsize % 4 == 0 else x.contiguous()


def _same_rows(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether the library takes these matrices: of one type it knows, of one shape, with contiguous rows."""
    return (
        x.dtype in DTYPE_CODES
        and x.dim() == 2
        and x.stride(1) == 1
        and all(other.dtype == x.dtype and other.shape == x.shape and other.stride(1) == 1 for other in others)
    )


def _same_vectors(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return weight.dtype == x.dtype and weight.is_contiguous()


def _same_heads(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether these [T, H, D] and cache tensors are of one type the library knows, heads contiguous and even."""
    return (
        first.dtype in DTYPE_CODES
        and first.shape[-1] % 2 == 0
        and first.stride(-1) == 1
        and all(other.dtype == first.dtype and other.stride(-1) == 1 for other in others)
    )


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous()
