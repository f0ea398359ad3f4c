"""What the public functions promise beyond what each backend computes."""

import pytest
import torch

from tokenmill_kernels import ops
from tokenmill_kernels.cpu.library import load


@pytest.mark.parametrize("num_blocks", [3, 4096])
def test_cache_of_a_head_is_one_run_per_block(num_blocks: int) -> None:
    keys, values = ops.allocate_kv_cache(num_blocks, 16, 2, 64, torch.bfloat16, "cpu")
    for cache in (keys, values):
        assert cache.shape == (num_blocks, 16, 2, 64)
        assert cache.stride() == (2 * 16 * 64, 64, 16 * 64, 1)
        assert not cache.any()
    keys[0] = 1.0
    assert not values.any()


def test_linear_takes_packed_and_plain_weights() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 12), torch.randn(7, 12), torch.randn(7)
    packed = ops.pack_linear(weight)
    assert isinstance(packed, ops.PackedWeight) == (load() is not None)
    torch.testing.assert_close(ops.linear(x, packed, bias), ops.linear(x, weight, bias))
    assert ops.linear_argmax(x, packed).tolist() == ops.linear_argmax(x, weight).tolist()
    assert torch.equal(ops.embedding(torch.tensor([3, 0, 6]), packed), weight[[3, 0, 6]])


def test_half_precision_goes_to_torch() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 12).half(), torch.randn(7, 12).half()
    assert ops.pack_linear(weight) is weight
    assert ops.linear(x, weight).dtype == torch.float16
    assert ops.linear(x, weight, out_dtype=torch.float32).dtype == torch.float32
    assert ops.rms_norm(x, weight[0], 1e-5).dtype == torch.float16
