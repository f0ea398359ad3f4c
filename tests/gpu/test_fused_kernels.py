"""Kernels that do several things at once, and chains of kernels that start before the ones before them are done."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.kernel_inputs import PagedShape, assert_near, cos_sin_table, fused_qkv, poisoned
from tokenmill_kernels import ops, reference
from tokenmill_kernels.gpu.launch import dependent_launch

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
BFLOAT16 = torch.bfloat16
LLAMA_8B = PagedShape(32, 8, 128, 16, BFLOAT16)
EIGHT_BITS = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (600, 2048), (7, 33), (77, 14336)])
def test_norms_where_they_are_wanted(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, width, device=CUDA).to(dtype).unbind()
    weight, table = torch.randn(width, device=CUDA).to(dtype), torch.randn(500, width, device=CUDA).to(dtype)
    ids = torch.randint(0, 500, (rows,), dtype=torch.int32, device=CUDA)
    out = poisoned(rows + 1, width, like=x)
    expected, total = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_near(ops.add_rms_norm(x, residual, weight, 1e-5, out=out[:rows])[1], total)
    assert_near(out[:rows], expected)
    assert out[rows].isnan().all()
    normed, embedded = ops.embed_rms_norm(ids, table, weight, 1e-5)
    assert torch.equal(embedded, table[ids])
    assert_near(normed, reference.rms_norm(embedded, weight, 1e-5))


@pytest.mark.parametrize(("first_width", "second_width"), [(4096, 4096), (24, 5000), (2048, 4096)])
def test_gather_rows(first_width: int, second_width: int) -> None:
    first, second = (torch.randn(300, width, device=CUDA).bfloat16() for width in (first_width, second_width))
    first[10], second[11] = float("nan"), float("nan")
    rows = torch.tensor([299, 0, -1, 7, 7, -1], dtype=torch.int32, device=CUDA)
    everything = zip(ops.gather_rows(first, second, rows), reference.gather_rows(first, second, rows), strict=True)
    for actual, expected in everything:
        assert torch.equal(actual, expected)
        assert not actual[rows < 0].any()


@pytest.mark.parametrize("k_scale", [None, 0.3, torch.tensor([0.3])])
def test_eight_bit_cache(k_scale: float | torch.Tensor | None) -> None:
    q, k, v = fused_qkv(LLAMA_8B, 77, "cuda")
    v[3, 0, :3] = torch.tensor([1e4, -1e4, float("nan")])
    scales = {"k_scale": k_scale.to(CUDA) if isinstance(k_scale, torch.Tensor) else k_scale, "v_scale": 2.5}
    table = cos_sin_table(100, 128, "cuda")
    positions = torch.randint(0, 100, (77,), dtype=torch.int32, device=CUDA)
    slots = torch.randperm(90, device=CUDA)[:77] - 1
    results = []
    for implementation in (ops.rotary_kv_write, reference.rotary_kv_write):
        caches = ops.allocate_kv_cache(6, 16, 8, 128, EIGHT_BITS, CUDA)
        implementation(q.clone(), k.clone(), v.clone(), table, positions, slots, *caches, **scales)
        results.append([cache.float() for cache in caches])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        actual.nan_to_num_()
        expected.nan_to_num_()
        # What lies between two numbers of 8 bits may fall to either side.
        torch.testing.assert_close(actual, expected, rtol=0.13, atol=2**-9)
        assert (actual != expected).float().mean() < 0.02


def test_chain_of_early_launches() -> None:
    """The small kernels of many layers in one graph, each of which reads what the one before it wrote: the same bits
    as when each of them is done before the next one starts."""
    assert dependent_launch(CUDA) == (torch.cuda.get_device_capability() >= (9, 0))
    num_tokens, width = 5, 4096
    weight = torch.rand(width, device=CUDA).bfloat16() + 0.5
    x, first_residual = torch.randn(2, num_tokens, width, device=CUDA).bfloat16().unbind()
    table = cos_sin_table(64, 128, "cuda")
    positions = torch.arange(num_tokens, dtype=torch.int32, device=CUDA)
    slots = torch.arange(num_tokens, device=CUDA)
    caches = ops.allocate_kv_cache(1, 16, 8, 128, BFLOAT16, CUDA)

    def layers(residual: torch.Tensor, between: Callable[[], None]) -> torch.Tensor:
        hidden = x
        for _ in range(24):
            normed, residual = ops.add_rms_norm(hidden, residual, weight, 1e-5)
            between()
            heads = normed.view(num_tokens, 32, 128)
            q, k, v = heads.split([16, 8, 8], dim=1)
            ops.rotary_kv_write(q, k, v, table, positions, slots, *caches)
            between()
            normed, residual = ops.add_rms_norm(normed, residual, weight, 1e-5)
            between()
            gathered, _ = ops.gather_rows(normed, residual, positions)
            between()
            hidden = torch.empty_like(x)
            hidden.copy_(ops.silu_mul(torch.cat((gathered, normed), dim=1)))
        return hidden

    expected = layers(first_residual.clone(), torch.cuda.synchronize)
    residual = first_residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layers(residual, lambda: None)
    for _ in range(20):
        residual.copy_(first_residual)
        result.fill_(float("nan"))
        graph.replay()
        assert torch.equal(result, expected)


def test_positions_may_be_read_early() -> None:
    """A projection stands between what writes the positions and what reads them before it waits."""
    weight = torch.randn(6144, 4096, device=CUDA).bfloat16() / 64
    table = cos_sin_table(4096, 128, "cuda")
    caches = ops.allocate_kv_cache(4, 16, 8, 128, BFLOAT16, CUDA)
    positions, slots = torch.zeros(33, dtype=torch.int32, device=CUDA), torch.zeros(33, dtype=torch.int64, device=CUDA)
    order = torch.arange(33, device=CUDA)
    x, fresh = torch.randn(33, 4096, device=CUDA).bfloat16(), torch.randint(0, 4096, (30, 33), device=CUDA).int()

    def step(new_positions: torch.Tensor, early: bool) -> torch.Tensor:
        positions.copy_(new_positions)
        slots.copy_((new_positions[0] + order) % 64)
        normed = ops.rms_norm(x, weight[0], 1e-5)
        qkv = ops.linear(normed, weight).view(33, 48, 128)
        q, k, v = qkv.split([32, 8, 8], dim=1)
        ops.rotary_kv_write(q, k, v, table, positions, slots, *caches, early=early)
        return qkv

    for new_positions in fresh:
        assert torch.equal(step(new_positions, early=True), step(new_positions, early=False))
