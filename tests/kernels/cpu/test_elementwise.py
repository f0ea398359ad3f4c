"""Norms, SiLU gate, rotary embedding and cache write, against the reference."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_inputs import PagedShape, assert_near, cos_sin_table, fused_qkv
from tokenmill_kernels import ops, reference
from tokenmill_kernels.cpu import ops as cpu

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (1, 576), (17, 81), (81, 17), (300, 640)])
def test_norms(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    wide = torch.randn(num_tokens, size + 3).to(dtype)
    x, residual = wide[:, :size], torch.randn(num_tokens, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    assert_near(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    normed, new_residual = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(normed, expected)
    assert torch.equal(new_residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (1, 1536), (17, 81), (200, 256)])
def test_silu_mul(dtype: torch.dtype, num_tokens: int, size: int) -> None:
    gate_up = (4 * torch.randn(num_tokens, 2 * size)).to(dtype)
    assert_near(cpu.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_mul_at_the_ends() -> None:
    """Gates so large that exp() of them is not a number in float32."""
    gate_up = torch.tensor([[1000.0, -1000.0, 0.0, float("nan"), 1.0, 1.0, 1.0, 1.0]])
    result = cpu.silu_mul(gate_up)[0]
    assert result[:3].tolist() == [1000.0, pytest.approx(0.0, abs=1e-30), 0.0]
    assert result[3].isnan()


@given(num_tokens=st.integers(1, 40), heads=st.sampled_from([(1, 1), (9, 3), (8, 1)]), data=st.data())
def test_rotary_kv_write(num_tokens: int, heads: tuple[int, int], data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from([16, 64, 80, 128, 256]))
    rotary_dim = data.draw(st.sampled_from([head_dim, head_dim // 2, 6]))
    has_norms = data.draw(st.booleans())
    shape = PagedShape(*heads, head_dim, 16, data.draw(st.sampled_from(DTYPES)))
    inputs = fused_qkv(shape, num_tokens)
    positions = torch.randint(0, 100, (num_tokens,), dtype=torch.int32)
    slots = torch.randperm(64)[:num_tokens]
    slots[torch.rand(num_tokens) < 0.2] = -1
    norms = (torch.randn(head_dim).to(shape.dtype), torch.randn(head_dim).to(shape.dtype)) if has_norms else ()
    results: list[list[torch.Tensor]] = []
    for write in (cpu.rotary_kv_write, reference.rotary_kv_write):
        q, k, v = (tensor.clone() for tensor in inputs)
        caches = ops.allocate_kv_cache(4, 16, shape.num_kv_heads, head_dim, shape.dtype, "cpu")
        write(q, k, v, cos_sin_table(100, rotary_dim), positions, slots, *caches, *norms)
        results.append([q, k, *caches])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)
    assert torch.equal(results[0][3], results[1][3])
