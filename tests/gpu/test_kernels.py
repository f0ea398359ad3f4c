"""Triton kernels compiled on a CUDA device: against the reference with odd sizes, and captured in CUDA graphs."""

from collections.abc import Iterator

import pytest
import torch
import triton

from tests.support.device_waits import capture
from tests.support.kernel_inputs import (
    PagedShape,
    assert_near,
    cos_sin_table,
    fused_qkv,
)
from tokenmill_kernels import ops, reference
from tokenmill_kernels.gpu import state

pytestmark = pytest.mark.gpu

CUDA = "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BFLOAT16 = torch.bfloat16
LLAMA_8B = PagedShape(32, 8, 128, 16, BFLOAT16)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Kernels run compiled, inputs are the same every run, and references are in full float32."""
    assert not triton.knobs.runtime.interpret
    assert not torch.backends.cuda.matmul.allow_tf32
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


# Norms and activation


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (1025, 576), (7, 33), (300, 14336)])
def test_norms_and_activation(rows: int, width: int, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, width, device=CUDA) * 3).to(dtype)
    weight = torch.randn(width, device=CUDA).to(dtype)
    residual = torch.randn(rows, width, device=CUDA).to(dtype)
    gate_up = torch.randn(rows, 2 * width, device=CUDA).to(dtype) * 4
    assert_near(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    for actual, wanted in zip(ops.add_rms_norm(x, residual, weight, 1e-5), expected, strict=True):
        assert_near(actual, wanted)
    assert_near(ops.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_norms_and_activation_in_a_graph() -> None:
    x, residual = torch.randn(2, 33, 4096, device=CUDA).bfloat16().unbind()
    weight = torch.randn(4096, device=CUDA).bfloat16()

    def call() -> tuple[torch.Tensor, ...]:
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        return normed, total, ops.rms_norm(x, weight, 1e-5), ops.silu_mul(x)

    graph, results = capture(call)
    for fresh in torch.randn(2, 2, 33, 4096, device=CUDA).bfloat16():
        x.copy_(fresh[0])
        residual.copy_(fresh[1])
        expected = (
            *reference.add_rms_norm(x, residual, weight, 1e-5),
            reference.rms_norm(x, weight, 1e-5),
            reference.silu_mul(x),
        )
        graph.replay()
        for actual, wanted in zip(results, expected, strict=True):
            assert_near(actual, wanted)


# Rotary embedding and cache write


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("shape", "rotary_dim", "num_tokens"),
    [
        (LLAMA_8B, 128, 1),
        (LLAMA_8B, 128, 1000),
        (PagedShape(9, 3, 64, 32, torch.float32), 64, 77),
        (PagedShape(28, 4, 96, 16, torch.float16), 96, 33),
        (PagedShape(12, 1, 64, 64, BFLOAT16), 24, 129),
        (PagedShape(8, 8, 256, 16, BFLOAT16), 128, 5),
        (PagedShape(4, 2, 16, 16, torch.float32), 16, 5),
    ],
)
def test_rotary_kv_write(shape: PagedShape, rotary_dim: int, num_tokens: int, norms: bool) -> None:
    results = []
    for implementation in (ops.rotary_kv_write, reference.rotary_kv_write):
        torch.manual_seed(1)
        q, k, v = fused_qkv(shape, num_tokens, CUDA)
        weights = [torch.rand(shape.head_dim, device=CUDA).to(shape.dtype) + 0.5 if norms else None for _ in range(2)]
        positions = torch.randint(0, 5000, (num_tokens,), dtype=torch.int32, device=CUDA)
        slots = torch.randperm(num_tokens + 7, device=CUDA)[:num_tokens] - 1
        caches = ops.allocate_kv_cache(
            num_tokens // shape.block_size + 2, shape.block_size, shape.num_kv_heads, shape.head_dim, shape.dtype, CUDA
        )
        implementation(q, k, v, cos_sin_table(5000, rotary_dim, CUDA), positions, slots, *caches, *weights, 1e-6)
        results.append((q, k, v, *caches))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


def test_rotary_kv_write_in_a_graph() -> None:
    q, k, v = fused_qkv(LLAMA_8B, 40, CUDA)
    table = cos_sin_table(512, 128, CUDA)
    positions = torch.zeros(40, dtype=torch.int32, device=CUDA)
    slots = torch.full((40,), -1, device=CUDA)
    caches = ops.allocate_kv_cache(8, 16, 8, 128, BFLOAT16, CUDA)
    graph, _ = capture(lambda: ops.rotary_kv_write(q, k, v, table, positions, slots, *caches))
    assert not caches[0].any()
    for padding in (0, 13):
        fresh = fused_qkv(LLAMA_8B, 40, CUDA)
        positions.copy_(torch.randint(0, 512, (40,)))
        slots.copy_(torch.randperm(128)[:40])
        slots[40 - padding :] = -1
        expected_caches = [cache.clone() for cache in caches]
        for buffer, values in zip((q, k, v), fresh, strict=True):
            buffer.copy_(values)
        graph.replay()
        reference.rotary_kv_write(*fresh, table, positions, slots, *expected_caches)
        for actual, expected in zip((q, k, *caches), (*fresh[:2], *expected_caches), strict=True):
            assert_near(actual, expected)


# Products


def test_float32_products_are_not_rounded_on_the_way() -> None:
    """Logits of about 20 are 0.125 apart in bfloat16: rounding would decide between near tokens."""
    x = torch.randn(5, 4096, device=CUDA).bfloat16()
    weight = torch.randn(1000, 4096, device=CUDA).bfloat16()
    expected = x.double() @ weight.double().T
    product = ops.linear(x, weight, out_dtype=torch.float32)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), expected, rtol=0, atol=1e-2)
    assert torch.equal(ops.linear_argmax(x, weight).long(), expected.argmax(dim=-1))


# Request state


def test_state_of_a_step_in_a_graph() -> None:
    num_slots, num_rows, num_tokens, block_size = 20, 8, 1500, 16
    tables = state.RequestTables(
        torch.randint(0, 1000, (num_slots, 4096), dtype=torch.int32, device=CUDA),
        torch.full((num_slots,), 1000, dtype=torch.int32, device=CUDA),
        torch.randint(0, 900, (num_slots,), dtype=torch.int32, device=CUDA),
    )
    blocks = torch.randint(0, 1 << 20, (num_slots, 256), dtype=torch.int32, device=CUDA)

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=CUDA)

    rows = state.StepRows(buffer(num_rows), buffer(num_rows + 1), 1200)
    out = state.StepTokens(buffer(num_tokens), buffer(num_tokens), buffer(num_rows))
    out_blocks, slot_mapping = buffer(num_rows, 256), buffer(num_tokens, dtype=torch.int64)
    sample_slots, sampled = buffer(num_rows) - 1, buffer(num_rows, dtype=torch.int64)

    def call() -> None:
        state.expand(tables, rows, block_size, out, [state.GroupBlocks(blocks, out_blocks, slot_mapping)])
        state.advance(tables, rows, sample_slots, sampled)

    graph, _ = capture(call)
    for counts in ([1, 1, 1200, 37], [1] * 8, [600, 700]):
        slots = torch.randperm(num_slots)[: len(counts)]
        starts = torch.tensor([0, *counts]).cumsum(0)
        rows.slots.fill_(-1)[: len(counts)] = slots.to(CUDA)
        rows.query_start_loc.fill_(sum(counts))[: len(counts) + 1] = starts.to(CUDA)
        sample_slots.fill_(-1)[: len(counts)] = slots.to(CUDA)
        sampled.copy_(torch.randint(0, 1000, (num_rows,)))
        computed, ends, token_ids = (
            table.cpu() for table in (tables.num_computed, tables.num_tokens, tables.token_ids)
        )
        graph.replay()

        token_slots = slots.repeat_interleave(torch.tensor(counts))
        positions = torch.cat([torch.arange(count) + computed[slot] for slot, count in zip(slots, counts, strict=True)])
        used = len(positions)
        assert torch.equal(out.positions.cpu()[:used], positions.int())
        assert torch.equal(out.input_ids.cpu()[:used], token_ids[token_slots, positions])
        seq_lens = computed[slots] + torch.tensor(counts)
        assert torch.equal(out.seq_lens.cpu()[: len(counts)], seq_lens.int())
        assert not out.seq_lens[len(counts) :].any()
        expected_slots = blocks.cpu()[token_slots, positions // block_size].long() * block_size + positions % block_size
        assert torch.equal(slot_mapping.cpu()[:used], expected_slots)
        assert (slot_mapping[used:] == -1).all()
        for row, seq_len in enumerate(seq_lens.tolist()):
            width = -(-seq_len // block_size)
            assert torch.equal(out_blocks[row, :width], blocks[slots[row], :width])
        assert torch.equal(tables.num_computed.cpu()[slots], seq_lens.int())
        assert torch.equal(tables.token_ids.cpu()[slots, ends[slots].long()], sampled.cpu()[: len(counts)].int())
        assert torch.equal(tables.num_tokens.cpu()[slots], ends[slots] + 1)


# Parts of a vocabulary


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_a_vocabulary(dtype: torch.dtype) -> None:
    """What three workers make of it together is what one makes of all of it."""
    weight = torch.randn(1000, 576, device=CUDA).to(dtype)
    x = torch.randn(17, 576, device=CUDA).to(dtype)
    ids = torch.randint(0, 1000, (33,), device=CUDA, dtype=torch.int32)
    firsts, parts = (0, 334, 668), weight.split(334)
    rows = [ops.embedding_part(ids, part, first) for first, part in zip(firsts, parts, strict=True)]
    assert torch.equal(rows[0] + rows[1] + rows[2], weight[ids])
    pairs = [ops.linear_best(x, part, first) for first, part in zip(firsts, parts, strict=True)]
    assert torch.equal(ops.pick_best(torch.stack(pairs, dim=1)), ops.linear_argmax(x, weight))
