"""Paged attention compiled on a CUDA device: against the reference with odd sizes, and captured in CUDA graphs.

What the tolerances say is in `kernel_inputs`: errors of a whole result, which are those of rounding it once and of
rounding the weights of values to the dtype of q.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import triton

from tests.support.device_waits import capture, refuse_synchronization
from tests.support.kernel_inputs import (
    PagedBatch,
    PagedShape,
    assert_near,
    cos_sin_table,
    fused_qkv,
    paged_batch,
    poisoned,
)
from tokenmill_kernels import ops, reference
from tokenmill_kernels.gpu import attention, attention_prefill_hopper
from tokenmill_kernels.gpu.compilation import compile_ahead

pytestmark = pytest.mark.gpu

CUDA = "cuda"
BFLOAT16 = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn
LLAMA_8B = PagedShape(32, 8, 128, 16, BFLOAT16)
DECODES = [(1, 40), (1, 7), (1, 1230), (1, 64), (1, 1), (1, 333)]
CHUNKS = [(17, 17), (133, 530), (2, 65), (3, 1000), (200, 200)]


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Kernels run compiled, inputs are the same every run, and references are in full float32."""
    assert not triton.knobs.runtime.interpret
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def plan_of(batch: PagedBatch, window: int | None) -> ops.AttentionPlan | None:
    """The plan that all layers of a step read."""
    lengths = {name: value for name, value in batch.lengths.items() if name not in ("block_tables", "max_seq_len")}
    num_tokens, num_heads, head_dim = batch.q.shape
    num_kv_heads = batch.k_cache.shape[2]
    return ops.plan_attention(
        **lengths,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=batch.q.dtype,
        window=window,
    )


def check(batch: PagedBatch, **options: Any) -> None:
    """The rows of all requests, against the reference, with a plan made on the spot and with one that layers share;
    output poisoned, no wait for the device."""
    options.setdefault("scale", batch.q.shape[-1] ** -0.5)
    num_tokens = int(batch.lengths["query_start_loc"][-1])
    outs = [poisoned(*batch.q.shape, like=batch.q) for _ in range(3)]
    with refuse_synchronization():
        shared = plan_of(batch, options.get("window"))
        for out, plan in zip(outs, (None, shared, shared), strict=True):
            ops.paged_attention(
                batch.q, batch.k_cache, batch.v_cache, **batch.lengths, **options, out=out, plan=plan
            )  # fmt: skip
    expected = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.lengths, **options)
    for out in outs:
        assert_near(out[:num_tokens], expected[:num_tokens])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (LLAMA_8B, {}),
        (LLAMA_8B, {"window": 100}),
        (PagedShape(32, 8, 128, 32, BFLOAT16), {"soft_cap": 3.0, "window": 257}),
        (PagedShape(32, 8, 64, 16, BFLOAT16), {}),
        (PagedShape(9, 3, 64, 64, torch.float16), {}),
        (PagedShape(14, 2, 64, 16, torch.float32), {}),
        (PagedShape(4, 4, 96, 16, torch.float16), {}),
        (PagedShape(28, 4, 128, 64, torch.float16), {"soft_cap": 20.0}),
        (PagedShape(8, 2, 128, 16, torch.float32), {"window": 64}),
        (PagedShape(8, 4, 256, 16, BFLOAT16), {}),
        (PagedShape(8, 4, 256, 32, torch.float32), {}),
        (PagedShape(4, 2, 16, 16, torch.float32), {"window": 9}),
        (PagedShape(40, 1, 128, 16, BFLOAT16), {}),
        (PagedShape(8, 2, 256, 64, BFLOAT16), {"window": 70}),
        (PagedShape(6, 2, 64, 32, torch.float16), {"soft_cap": 2.0}),
        (PagedShape(32, 8, 128, 16, BFLOAT16, FLOAT8), {"k_scale": 0.3, "v_scale": 2.0}),
        (PagedShape(8, 2, 64, 64, torch.float16, FLOAT8), {"window": 99}),
    ],
)
def test_paged_attention(shape: PagedShape, options: dict[str, Any]) -> None:
    check(paged_batch(shape, DECODES + CHUNKS, device=CUDA), **options)


@pytest.mark.parametrize("requests", [DECODES, CHUNKS])
def test_batches_of_one_kind(requests: Sequence[tuple[int, int]]) -> None:
    check(paged_batch(LLAMA_8B, requests, device=CUDA))


@pytest.mark.parametrize("num_decodes", [0, 1])
def test_hints_bound_the_launch_and_nothing_else(num_decodes: int) -> None:
    check(paged_batch(LLAMA_8B, DECODES + CHUNKS, num_decodes=num_decodes, device=CUDA))


@pytest.mark.parametrize("num_requests", [1, 8, 63, 300])
def test_random_lengths(num_requests: int) -> None:
    totals = torch.randint(1, 3000, (num_requests,)).tolist()
    decodes = [(1, total) for total in totals]
    chunks = [(int(torch.randint(2, total + 2, ())), total + 1) for total in totals[:6]]
    check(paged_batch(LLAMA_8B, decodes, device=CUDA))
    check(paged_batch(LLAMA_8B, decodes + chunks, device=CUDA))


def test_one_request_far_longer_than_the_others() -> None:
    check(paged_batch(LLAMA_8B, [(1, 5), (1, 60_000), (1, 900), (30, 20_000)], device=CUDA))


@pytest.mark.parametrize("window", [None, 4096])
def test_long_prefill(window: int | None) -> None:
    check(paged_batch(PagedShape(8, 2, 128, 16, BFLOAT16), [(3000, 9000)], device=CUDA), window=window)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_scales_per_head_of_a_cache_of_8_bit_floats(block_size: int) -> None:
    scales = {"k_scale": torch.rand(2, device=CUDA) + 0.5, "v_scale": torch.rand(2, device=CUDA) + 0.5}
    check(paged_batch(PagedShape(8, 2, 128, block_size, BFLOAT16, FLOAT8), DECODES + CHUNKS, device=CUDA), **scales)


@pytest.mark.parametrize("total", [15, 16, 17, 64, 127, 128, 129, 255, 257])
def test_chunks_around_tiles(total: int) -> None:
    chunks = [(total, total), (min(total, 40), total), (33, total + 64), (2, total)]
    check(paged_batch(LLAMA_8B, chunks, device=CUDA))
    check(paged_batch(PagedShape(8, 4, 64, 16, BFLOAT16), chunks, device=CUDA), window=100)


def test_more_tiles_than_programs() -> None:
    check(paged_batch(LLAMA_8B, [(65, 65 + 7 * i) for i in range(100)], device=CUDA))


def test_queries_that_cannot_be_copied_in_long_words() -> None:
    batch = paged_batch(PagedShape(8, 2, 128, 16, BFLOAT16), CHUNKS, device=CUDA)
    wide = torch.zeros(batch.q.shape[0], 8, 129, dtype=BFLOAT16, device=CUDA)
    wide[..., 1:] = batch.q
    check(PagedBatch(wide[..., 1:], batch.k_cache, batch.v_cache, batch.lengths))


@pytest.fixture
def too_large_for_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The prefill kernel for Hopper asks for more shared memory than there is."""
    monkeypatch.setattr(attention_prefill_hopper, "_TILES", {128: (128, 20)})
    attention._hopper.cache_clear()
    yield
    attention._hopper.cache_clear()


@pytest.mark.usefixtures("too_large_for_hopper")
@pytest.mark.parametrize("ahead", [False, True])
def test_without_the_kernel_for_hopper(ahead: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The portable one serves, whether the other fails in a rehearsal or at a launch."""
    batch = paged_batch(LLAMA_8B, CHUNKS, device=CUDA)
    if ahead:
        operands = (batch.q, batch.k_cache, batch.v_cache)
        compile_ahead([lambda: ops.paged_attention(*operands, **batch.lengths, scale=1.0)], torch.device(CUDA, 0))
    check(batch)
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    warnings = [record for record in caplog.records if "the kernel for Hopper is of no use" in record.message]
    assert len(warnings) == is_hopper


def test_cache_of_more_elements_than_int32_counts() -> None:
    num_blocks = (1 << 31) // (16 * 8 * 128) + 64
    caches = ops.allocate_kv_cache(num_blocks, 16, 8, 128, BFLOAT16, CUDA)
    small = paged_batch(LLAMA_8B, [(1, 500), (40, 300)], device=CUDA)
    for cache, source in zip(caches, (small.k_cache, small.v_cache), strict=True):
        cache[-source.shape[0] :] = source
    small.lengths["block_tables"] += num_blocks - small.k_cache.shape[0]
    check(PagedBatch(small.q, *caches, small.lengths))

    q, k, v = fused_qkv(LLAMA_8B, 3, CUDA)
    slots = torch.arange(3, device=CUDA) + num_blocks * 16 - 3
    positions = torch.zeros(3, dtype=torch.int32, device=CUDA)
    ops.rotary_kv_write(q, k, v, cos_sin_table(8, 128, CUDA), positions, slots, *caches)
    assert torch.equal(caches[0][-1, -3:], k)
    assert torch.equal(caches[1][-1, -3:], v)


def load(buffers: PagedBatch, batch: PagedBatch) -> None:
    """Puts a batch into the buffers that a graph reads: padded requests are empty, caches are as large as needed."""
    num_requests = batch.lengths["seq_lens"].shape[0]
    buffers.q[: batch.q.shape[0]] = batch.q
    buffers.k_cache[: batch.k_cache.shape[0]] = batch.k_cache
    buffers.v_cache[: batch.v_cache.shape[0]] = batch.v_cache
    buffers.lengths["seq_lens"].zero_()[:num_requests] = batch.lengths["seq_lens"]
    starts = batch.lengths["query_start_loc"]
    buffers.lengths["query_start_loc"].fill_(int(starts[-1]))[: num_requests + 1] = starts
    tables = batch.lengths["block_tables"]
    buffers.lengths["block_tables"].zero_()[:num_requests, : tables.shape[1]] = tables


@pytest.mark.parametrize(
    ("num_decodes", "max_query_len", "batches"),
    [
        (8, 1, [DECODES, [(1, 999)], [*DECODES[::-1], (1, 77), (1, 5000)]]),
        (1, 300, [DECODES[:3] + CHUNKS, [(300, 4000)], CHUNKS, DECODES, [(1, 1)] * 7 + [(293, 293)]]),
    ],
)
def test_one_graph_serves_any_lengths(
    num_decodes: int, max_query_len: int, batches: Sequence[Sequence[tuple[int, int]]]
) -> None:
    num_tokens = 8 if max_query_len == 1 else 400
    caches = ops.allocate_kv_cache(600, 16, 8, 128, BFLOAT16, CUDA)
    lengths = {
        "query_start_loc": torch.zeros(9, dtype=torch.int32, device=CUDA),
        "seq_lens": torch.zeros(8, dtype=torch.int32, device=CUDA),
        "block_tables": torch.zeros(8, 400, dtype=torch.int32, device=CUDA),
    }
    hints = {"num_decodes": num_decodes, "max_query_len": max_query_len, "max_seq_len": 6400, "scale": 0.09}
    buffers = PagedBatch(torch.zeros(num_tokens, 32, 128, device=CUDA).bfloat16(), *caches, lengths)
    out = torch.empty_like(buffers.q)
    graph, _ = capture(lambda: ops.paged_attention(buffers.q, *caches, **lengths, **hints, out=out))
    for requests in batches:
        load(buffers, paged_batch(LLAMA_8B, requests, device=CUDA))
        out.fill_(float("nan"))
        graph.replay()
        used = int(lengths["query_start_loc"][-1])
        expected = reference.paged_attention(buffers.q, *caches, **lengths, **hints)
        assert_near(out[:used], expected[:used])


@pytest.mark.parametrize("window", [None, 200])
def test_one_graph_serves_any_mix_of_512_tokens(window: int | None) -> None:
    shape = PagedShape(8, 2, 128, 16, BFLOAT16)
    caches = ops.allocate_kv_cache(2200, 16, 2, 128, BFLOAT16, CUDA)
    lengths = {
        "query_start_loc": torch.zeros(513, dtype=torch.int32, device=CUDA),
        "seq_lens": torch.zeros(512, dtype=torch.int32, device=CUDA),
        "block_tables": torch.zeros(512, 400, dtype=torch.int32, device=CUDA),
    }
    hints = {"num_decodes": 1, "max_query_len": 512, "max_seq_len": 6400}
    buffers = PagedBatch(torch.zeros(512, 8, 128, device=CUDA).bfloat16(), *caches, lengths | hints)
    outs = torch.empty(2, *buffers.q.shape, dtype=BFLOAT16, device=CUDA)

    def step() -> None:
        shared = plan_of(buffers, window)
        for out, plan in zip(outs, (None, shared), strict=True):
            ops.paged_attention(
                buffers.q, *caches, **lengths, **hints, scale=0.09, window=window, out=out, plan=plan
            )  # fmt: skip

    graph, _ = capture(step)
    mixes = [
        [(1, 30 + i % 40) for i in range(512)],
        [(1, 700)] * 5 + [(7, 400), (500, 900)],
        [(512, 5000)],
        [(2, 60)] * 256,
        [(1, 3)],
    ]
    for requests in mixes:
        load(buffers, paged_batch(shape, requests, device=CUDA))
        outs.fill_(float("nan"))
        graph.replay()
        used = sum(query_len for query_len, _ in requests)
        expected = reference.paged_attention(buffers.q, *caches, **lengths, **hints, scale=0.09, window=window)
        for out in outs:
            assert_near(out[:used], expected[:used])
    lengths["query_start_loc"].zero_()
    lengths["seq_lens"].zero_()
    outs.fill_(float("nan"))
    graph.replay()
    assert outs.isnan().all()
