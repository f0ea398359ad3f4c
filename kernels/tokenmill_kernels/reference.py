"""Every kernel in plain PyTorch: the oracle of the tests, and the fallback where nothing faster exists.

Written for clarity. Arithmetic is done in float32 and rounded to the input's dtype once, at the end.
Arguments and layouts are described in `tokenmill_kernels.ops`, which has the same signatures.
"""

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm(x + residual), x + residual); the sum is rounded to the input's dtype before it is normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def gather_rows(first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of both tensors; zeros where `rows` is negative."""
    owned = (rows >= 0).unsqueeze(1)
    index = rows.clamp(min=0).long()
    return torch.where(owned, first[index], 0), torch.where(owned, second[index], 0)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where gate is the first half of the last dimension and up the second."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [T, H, D] at `positions` [T]; dimensions past the rotary ones pass through."""
    half = cos_sin.shape[-1] // 2
    table = cos_sin.float()[positions.long()].unsqueeze(1)
    cos, sin = table[..., :half], table[..., half:]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.to(x.dtype)


def rotate_rows(
    q: torch.Tensor, k: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of q and k by its own angles, rounded once."""
    cos, sin = cosines[:, None], sines[:, None]

    def turned(heads: torch.Tensor) -> torch.Tensor:
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(heads.dtype)

    return turned(q), turned(k)


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
    """Normalises (when weights are given) and rotates q and k in place, then writes k and v to their slots."""
    if q_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
    if k_norm is not None:
        k.copy_(rms_norm(k, k_norm, eps))
    q.copy_(rotate(q, cos_sin, positions))
    k.copy_(rotate(k, cos_sin, positions))
    block_size = k_cache.shape[1]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // block_size, slots % block_size
    for cache, values, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        cache[blocks, offsets] = _to_cache(values[kept], scale, cache.dtype)


def _to_cache(values: torch.Tensor, scale: torch.Tensor | float | None, dtype: torch.dtype) -> torch.Tensor:
    """values / scale in the cache's type; an 8-bit one saturates."""
    if scale is not None:
        values = values.float() / scale
    if dtype.itemsize == 1:
        limits = torch.finfo(dtype)
        values = values.float().clamp(limits.min, limits.max)
    return values.to(dtype)


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
) -> torch.Tensor:
    """Causal attention of each request's new tokens over its cached keys; one request at a time. Padded rows give 0.

    `num_decodes`, `max_query_len` and `max_seq_len` are launch hints that this version does not need.
    """
    result = torch.zeros_like(q) if out is None else out.zero_()
    starts = query_start_loc.tolist()
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[request], starts[request + 1]
        if first == last or seq_len == 0:
            continue
        keys = _gather_blocks(k_cache, block_tables[request], seq_len, k_scale)
        values = _gather_blocks(v_cache, block_tables[request], seq_len, v_scale)
        result[first:last] = _attend(q[first:last], keys, values, scale, window, soft_cap).to(q.dtype)
    return result


def _gather_blocks(
    cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, scale: float | torch.Tensor | None
) -> torch.Tensor:
    """The first `seq_len` cached rows of one request times their scale (of all heads, or [KH]), float32
    [seq_len, KH, D]."""
    block_size = cache.shape[1]
    num_blocks = -(-seq_len // block_size)
    # Bytes are gathered: not every device indexes 8-bit floats.
    raw = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    rows = raw[block_table[:num_blocks].long()].flatten(0, 1)[:seq_len].view(cache.dtype).float()
    if scale is None:
        return rows
    return rows * (scale.view(-1, 1) if isinstance(scale, torch.Tensor) else scale)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> torch.Tensor:
    """Attention of the last q.shape[0] positions of one request, float32 [num_queries, H, D]."""
    num_queries, num_heads, _ = q.shape
    seq_len, num_kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float() * scale, keys)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_positions = torch.arange(seq_len - num_queries, seq_len, device=q.device).unsqueeze(1)
    key_positions = torch.arange(seq_len, device=q.device).unsqueeze(0)
    visible = key_positions <= query_positions
    if window is not None:
        visible &= key_positions > query_positions - window
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Rows `ids` of `weight`."""
    return weight[ids.long()]


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32."""
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(out_dtype or x.dtype)


def gated_linear(x: torch.Tensor, gate_up_weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up of gate | up = x @ gate_up_weight.T + bias, rounded once."""
    return silu_mul(linear(x, gate_up_weight, bias, out_dtype=torch.float32)).to(x.dtype)


def linear_argmax(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Index of the largest entry of each row of x @ weight.T (the lowest index of equals), -1 for a row with a NaN."""
    logits = linear(x, weight, out_dtype=torch.float32)
    best = logits.argmax(dim=-1)
    return torch.where(logits.isnan().any(dim=-1), torch.full_like(best, -1), best)
