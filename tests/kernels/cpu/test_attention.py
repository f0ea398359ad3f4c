"""Paged attention of the C++ library, against the reference and against itself in other batches."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_inputs import PagedBatch, PagedShape, assert_near, paged_batch, poisoned
from tokenmill_kernels import reference
from tokenmill_kernels.cpu import ops as cpu

DTYPES = [torch.float32, torch.bfloat16]
DECODES = [(1, 1), (1, 17), (1, 300), (1, 512), (1, 513), (1, 1600)]
CHUNKS = [(17, 17), (81, 333), (2, 129), (3, 700), (5, 5)]


def attend(batch: PagedBatch, **options: Any) -> torch.Tensor:
    options.setdefault("scale", 0.11)
    out = poisoned(*batch.q.shape, like=batch.q)
    returned = cpu.paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.lengths, **options, out=out)
    assert returned is out
    return out


def check(batch: PagedBatch, **options: Any) -> None:
    options.setdefault("scale", 0.11)
    expected = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.lengths, **options)
    assert_near(attend(batch, **options), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(9, 3), (2, 2), (8, 1)])
def test_heads(dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    check(paged_batch(PagedShape(num_heads, num_kv_heads, head_dim, 16, dtype), DECODES + CHUNKS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 8, 16, 32, 48, 256])
def test_block_sizes(dtype: torch.dtype, block_size: int) -> None:
    check(paged_batch(PagedShape(6, 2, 64, block_size, dtype), DECODES + CHUNKS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 33, 128, 600, 5000])
def test_windows(dtype: torch.dtype, window: int) -> None:
    check(paged_batch(PagedShape(4, 2, 64, 16, dtype), DECODES + CHUNKS), window=window)


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(dtype: torch.dtype) -> None:
    batch = paged_batch(PagedShape(4, 2, 64, 16, dtype), DECODES + CHUNKS)
    check(batch, soft_cap=1.5)
    check(batch, soft_cap=0.5, window=50)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(64, 1), (20, 1), (65, 1)])
def test_large_groups(num_heads: int, num_kv_heads: int) -> None:
    check(paged_batch(PagedShape(num_heads, num_kv_heads, 32), [(1, 70), (7, 70)]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_requests_are_left_alone(dtype: torch.dtype) -> None:
    check(paged_batch(PagedShape(4, 2, 64, 16, dtype), [*DECODES, *CHUNKS], padding=3))


def test_scores_far_from_zero() -> None:
    """Weights that are one and zero, and sums that would overflow without the maximum taken off."""
    batch = paged_batch(PagedShape(4, 2, 64), DECODES + CHUNKS)
    check(batch, scale=50.0)


def test_a_request_of_nan_harms_itself_alone() -> None:
    requests = [(1, 40), (1, 300), (20, 20), (30, 90)]
    batch = paged_batch(PagedShape(6, 2, 64, 16, torch.bfloat16), requests)
    clean = attend(batch)
    starts = batch.lengths["query_start_loc"].tolist()
    for victim in (0, 2):
        batch.q[starts[victim] : starts[victim + 1]] = float("nan")
    attended = attend(batch)
    for index in range(len(requests)):
        rows = slice(starts[index], starts[index + 1])
        assert attended[rows].isnan().all() if index in (0, 2) else torch.equal(attended[rows], clean[rows])


def restrict(batch: PagedBatch, request: int, first: int, last: int) -> PagedBatch:
    """Tokens first .. last - 1 of one request's new tokens, alone in a batch."""
    start = int(batch.lengths["query_start_loc"][request])
    end = int(batch.lengths["query_start_loc"][request + 1])
    seq_len = int(batch.lengths["seq_lens"][request]) - (end - start) + last
    lengths = batch.lengths | {
        "query_start_loc": torch.tensor([0, last - first], dtype=torch.int32),
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32),
        "block_tables": batch.lengths["block_tables"][request : request + 1],
    }
    return PagedBatch(batch.q[start + first : start + last], batch.k_cache, batch.v_cache, lengths)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    requests = DECODES + CHUNKS
    batch = paged_batch(PagedShape(6, 2, 64, 16, dtype), requests)
    together = attend(batch)
    start = 0
    for index, (num_tokens, _) in enumerate(requests):
        alone = attend(restrict(batch, index, 0, num_tokens))
        assert torch.equal(alone, together[start : start + num_tokens])
        start += num_tokens


@given(cuts=st.sets(st.integers(1, 99)), window=st.sampled_from([None, 40]), dtype=st.sampled_from(DTYPES))
def test_chunks_give_what_the_whole_gives(cuts: set[int], window: int | None, dtype: torch.dtype) -> None:
    """To the bit where a chunk has several tokens; a single token takes the way of a decode."""
    torch.manual_seed(0)
    batch = paged_batch(PagedShape(6, 2, 32, 16, dtype), [(100, 150)])
    whole = attend(batch, window=window)
    edges = [0, *sorted(cuts), 100]
    for first, last in pairwise(edges):
        part = attend(restrict(batch, 0, first, last), window=window)
        if last - first > 1:
            assert torch.equal(part, whole[first:last])
        else:
            assert_near(part, whole[first:last])
