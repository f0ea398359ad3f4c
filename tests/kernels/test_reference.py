"""The oracle itself, against PyTorch's own functions and against arithmetic written another way."""

import pytest
import torch
from torch.nn import functional as F

from tests.support.kernel_inputs import PagedShape, assert_near, cos_sin_table, fused_qkv, paged_batch
from tokenmill_kernels import ops, reference


@pytest.fixture(autouse=True)
def same_inputs_every_run() -> None:
    torch.manual_seed(0)


def test_norms_are_torchs() -> None:
    x, residual, weight = torch.randn(17, 81), torch.randn(17, 81), torch.randn(81)
    assert_near(reference.rms_norm(x, weight, 1e-5), F.rms_norm(x, (81,), weight, 1e-5))
    normed, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_near(normed, F.rms_norm(x + residual, (81,), weight, 1e-5))


def test_gate_is_the_first_half() -> None:
    gate_up = torch.randn(3, 34)
    assert_near(reference.silu_mul(gate_up), F.silu(gate_up[:, :17]) * gate_up[:, 17:])


def test_rotation_is_a_complex_product() -> None:
    x, positions = torch.randn(5, 2, 16), torch.tensor([0, 1, 7, 3, 63])
    angles = positions.unsqueeze(1) * 10000.0 ** (-torch.arange(0, 12, 2) / 12)
    turned = torch.complex(x[..., :6], x[..., 6:12]) * torch.polar(torch.ones(5, 6), angles).unsqueeze(1)
    expected = torch.cat((turned.real, turned.imag, x[..., 12:]), dim=-1)
    assert_near(reference.rotate(x, cos_sin_table(64, 12), positions), expected)


def test_keys_and_values_land_in_their_slots() -> None:
    shape = PagedShape(4, 2, 8, block_size=4)
    q, k, v = fused_qkv(shape, 3)
    unrotated = k.clone()
    k_cache, v_cache = ops.allocate_kv_cache(3, 4, 2, 8, torch.float32, "cpu")
    positions, slots = torch.tensor([0, 5, 9]), torch.tensor([11, -1, 2])
    reference.rotary_kv_write(q, k, v, cos_sin_table(16, 8), positions, slots, k_cache, v_cache)
    assert torch.equal(k_cache[2, 3], k[0])
    assert torch.equal(v_cache[0, 2], v[2])
    assert torch.equal(k[0], unrotated[0])
    assert not torch.equal(k[1], unrotated[1])
    assert int(k_cache.count_nonzero()) == int(v_cache.count_nonzero()) == 2 * 2 * 8


@pytest.mark.parametrize("window", [None, 1, 9])
def test_attention_is_torchs(window: int | None) -> None:
    """The last 5 of 21 tokens, with 6 query heads on 2 KV heads."""
    batch = paged_batch(PagedShape(6, 2, 8), [(5, 21)])
    attended = reference.paged_attention(
        batch.q, batch.k_cache, batch.v_cache, **batch.lengths, scale=0.3, window=window
    )
    table = batch.lengths["block_tables"][0].long()
    keys, values = (cache[table].flatten(0, 1)[:21].transpose(0, 1) for cache in (batch.k_cache, batch.v_cache))
    distance = torch.arange(16, 21).unsqueeze(1) - torch.arange(21)
    visible = (distance >= 0) & (distance < (window or 21))
    expected = F.scaled_dot_product_attention(
        batch.q.transpose(0, 1), keys, values, attn_mask=visible, scale=0.3, enable_gqa=True
    )
    assert_near(attended, expected.transpose(0, 1))


def test_soft_cap_bends_scores() -> None:
    """Two keys of scores 0 and 100, capped at 1: the second weighs e times the first."""
    k_cache, v_cache = ops.allocate_kv_cache(1, 2, 1, 2, torch.float32, "cpu")
    k_cache[0, 1, 0, 0] = 100.0
    v_cache[0, 1, 0, 1] = 1.0
    attended = reference.paged_attention(
        torch.tensor([[[1.0, 0.0]]]),
        k_cache,
        v_cache,
        query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([2]),
        block_tables=torch.tensor([[0]]),
        num_decodes=1,
        max_query_len=1,
        max_seq_len=2,
        scale=1.0,
        soft_cap=1.0,
    )
    assert attended[0, 0, 1].item() == pytest.approx(torch.tensor(1.0).sigmoid().item(), rel=1e-6)


def test_argmax_takes_the_lowest_of_equals_and_marks_nan() -> None:
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [float("nan"), 0.0]])
    assert reference.linear_argmax(x, weight).tolist() == [1, 0, -1]
