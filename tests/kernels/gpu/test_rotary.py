"""Rotary embedding and cache write in the interpreter."""

import pytest
import torch

from tests.support.kernel_inputs import PagedShape, assert_near, cos_sin_table, fused_qkv
from tokenmill_kernels import ops, reference
from tokenmill_kernels.gpu.rotary import rotary_kv_write, rotate_rows

POSITIONS = torch.tensor([0, 5, 99, 31, 7], dtype=torch.int32)
SLOTS = torch.tensor([3, -1, 40, 17, 0])


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [
        (PagedShape(4, 2, 64), 64),
        (PagedShape(9, 3, 96, 32, torch.bfloat16), 96),
        (PagedShape(12, 1, 128, 16, torch.float16), 128),
        (PagedShape(3, 3, 64, 16), 24),
        (PagedShape(1, 1, 256, 64, torch.bfloat16), 128),
    ],
)
def test_against_reference(shape: PagedShape, rotary_dim: int, norms: bool) -> None:
    q, k, v = fused_qkv(shape, len(POSITIONS))
    weights = [torch.rand(shape.head_dim).to(shape.dtype) + 0.5 if norms else None for _ in range(2)]
    table = cos_sin_table(100, rotary_dim)
    results = []
    for implementation in (rotary_kv_write, reference.rotary_kv_write):
        caches = ops.allocate_kv_cache(4, shape.block_size, shape.num_kv_heads, shape.head_dim, shape.dtype, "cpu")
        inputs = q.clone(), k.clone(), v.clone()
        implementation(*inputs, table, POSITIONS, SLOTS, *caches, *weights, 1e-6)
        results.append((*inputs, *caches))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


def test_views_of_one_projection() -> None:
    shape = PagedShape(4, 2, 16)
    q, k, v = fused_qkv(shape, len(POSITIONS))
    expected_q = reference.rotate(q, cos_sin_table(100, 16), POSITIONS)
    expected_k = reference.rotate(k, cos_sin_table(100, 16), POSITIONS)
    before = v.clone()
    k_cache, v_cache = ops.allocate_kv_cache(4, 16, 2, 16, torch.float32, "cpu")
    rotary_kv_write(q, k, v, cos_sin_table(100, 16), POSITIONS, SLOTS, k_cache, v_cache)
    assert_near(q, expected_q)
    assert_near(k, expected_k)
    assert torch.equal(v, before)
    assert_near(k_cache[2, 8], expected_k[2])
    assert torch.equal(v_cache[2, 8], v[2])


def test_padding_writes_nothing() -> None:
    q, k, v = fused_qkv(PagedShape(2, 1, 32), 3)
    caches = ops.allocate_kv_cache(2, 16, 1, 32, torch.float32, "cpu")
    padding = torch.full((3,), -1)
    rotary_kv_write(q, k, v, cos_sin_table(8, 32), torch.zeros(3, dtype=torch.int32), padding, *caches)
    assert not caches[0].any()
    assert not caches[1].any()


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_cache(dtype: torch.dtype, as_tensor: bool) -> None:
    """With numbers that e4m3 holds exactly, unrotated: the interpreter does not round to 8 bits as GPUs do."""
    q, k, v = fused_qkv(PagedShape(4, 2, 64, 16, dtype), len(POSITIONS))
    for values in (k, v):
        values.copy_(torch.randn(values.shape).clamp(-1.9, 1.9).mul(8).round().div(8))
    v[0, 0, :2] = torch.tensor([1e4, -1e4])
    scales = {"k_scale": torch.tensor([0.25]) if as_tensor else 0.25, "v_scale": torch.tensor(4.0) if as_tensor else 4}
    rotation, positions = cos_sin_table(1, 32), torch.zeros_like(POSITIONS)
    for given, k_scale, v_scale in ((scales, 0.25, 4.0), ({}, 1.0, 1.0)):
        k_cache, v_cache = ops.allocate_kv_cache(4, 16, 2, 64, torch.float8_e4m3fn, "cpu")
        rotary_kv_write(q, k, v, rotation, positions, SLOTS, k_cache, v_cache, **given)
        reference_caches = ops.allocate_kv_cache(4, 16, 2, 64, torch.float8_e4m3fn, "cpu")
        ops.rotary_kv_write(q, k, v, rotation, positions, SLOTS, *reference_caches, **given)
        for token, slot in enumerate(SLOTS.tolist()):
            if slot >= 0:
                assert torch.equal(k_cache[slot // 16, slot % 16].float() * k_scale, k[token].float())
                limited = v[token].float().clamp(-448 * v_scale, 448 * v_scale)
                assert torch.equal(v_cache[slot // 16, slot % 16].float() * v_scale, limited)
        assert torch.equal(k_cache.float(), reference_caches[0].float())
        assert torch.equal(v_cache.float(), reference_caches[1].float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(16, 80), (2, 16), (9, 72), (1, 128)])
def test_rows_turn_by_angles_of_their_own(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Queries and keys of one product, in place; the values beside them stay."""
    qkv = torch.randn(7, 3, num_heads, head_dim).to(dtype)
    angles = 9 * torch.rand(7, head_dim // 2)
    before = qkv.clone()
    rotate_rows(qkv[:, 0], qkv[:, 1], angles.cos(), angles.sin())
    expected = reference.rotate_rows(before[:, 0], before[:, 1], angles.cos(), angles.sin())
    assert_near(qkv[:, 0], expected[0])
    assert_near(qkv[:, 1], expected[1])
    assert torch.equal(qkv[:, 2], before[:, 2])
    assert (qkv[:, :2] != before[:, :2]).float().mean() > 0.9
