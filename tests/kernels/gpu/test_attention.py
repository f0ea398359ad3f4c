"""Paged attention in the interpreter, which has few programs: runs of tiles cross heads and requests all the time.

Without bfloat16: the interpreter's matrix product takes its bits for integers.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.kernel_inputs import PagedBatch, PagedShape, assert_near, paged_batch, poisoned
from tokenmill_kernels import reference
from tokenmill_kernels.gpu import attention_tiles
from tokenmill_kernels.gpu.attention import paged_attention, plan_attention
from tokenmill_kernels.gpu.attention_plan import AttentionPlan
from tokenmill_kernels.gpu.attention_tiles import decode_config
from tokenmill_kernels.gpu.launch import DeviceLimits

DECODES = [(1, 40), (1, 7), (1, 230), (1, 64), (1, 1)]
CHUNKS = [(17, 17), (33, 130), (2, 65)]


def plan_of(batch: PagedBatch, window: int | None) -> AttentionPlan:
    """The plan that all layers of a step read."""
    lengths = {name: value for name, value in batch.lengths.items() if name not in ("block_tables", "max_seq_len")}
    num_tokens, num_heads, head_dim = batch.q.shape
    num_kv_heads = batch.k_cache.shape[2]
    return plan_attention(
        **lengths,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=batch.q.dtype,
        window=window,
    )


def check(batch: PagedBatch, plan: AttentionPlan | None = None, **options: Any) -> None:
    """The rows of all requests, against the reference; q strided, output poisoned."""
    options.setdefault("scale", 0.11)
    num_tokens = int(batch.lengths["query_start_loc"][-1])
    out = poisoned(*batch.q.shape, like=batch.q)
    returned = paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.lengths, **options, out=out, plan=plan)
    expected = reference.paged_attention(batch.q, batch.k_cache, batch.v_cache, **batch.lengths, **options)
    assert returned is out
    assert_near(out[:num_tokens], expected[:num_tokens])


@pytest.mark.parametrize(
    ("shape", "requests", "options"),
    [
        (PagedShape(4, 2, 64), DECODES, {}),
        (PagedShape(4, 2, 64), CHUNKS, {}),
        (PagedShape(4, 2, 64), DECODES + CHUNKS, {}),
        (PagedShape(7, 1, 96, 32), DECODES + CHUNKS, {}),
        (PagedShape(2, 2, 128, 64, torch.float16), DECODES + CHUNKS, {}),
        (PagedShape(4, 2, 256, 16, torch.float16), DECODES[:2] + CHUNKS[:2], {}),
        (PagedShape(6, 2, 16), DECODES + CHUNKS, {"window": 20}),
        (PagedShape(4, 2, 64, 16, torch.float16), DECODES + CHUNKS, {"window": 64}),
        (PagedShape(4, 2, 32), DECODES + CHUNKS, {"window": 1}),
        (PagedShape(4, 2, 32), DECODES + CHUNKS, {"window": 1000}),
        (PagedShape(4, 2, 64), DECODES + CHUNKS, {"soft_cap": 2.0}),
        (PagedShape(4, 2, 64, 32), DECODES + CHUNKS, {"soft_cap": 1.0, "window": 33}),
        (PagedShape(20, 1, 32), [(1, 40), (2, 37), (3, 3)], {}),
    ],
)
def test_against_reference(shape: PagedShape, requests: Sequence[tuple[int, int]], options: dict[str, Any]) -> None:
    check(paged_batch(shape, requests), **options)


@pytest.mark.parametrize("num_requests", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_tiles_for_fast_memory(num_requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = decode_config(128, torch.float16, num_requests, torch.device("cpu"))
    monkeypatch.setattr(attention_tiles, "device_limits", lambda device: DeviceLimits(3, 228 << 10, 4.8e12))
    assert decode_config(128, torch.float16, num_requests, torch.device("cpu")) != usual
    requests = (DECODES * num_requests)[: num_requests - 1] + CHUNKS[:1]
    check(paged_batch(PagedShape(4, 2, 128, 16, torch.float16), requests))


@pytest.mark.parametrize("total", [15, 16, 17, 63, 64, 65, 128, 129])
def test_lengths_around_tiles(total: int) -> None:
    check(paged_batch(PagedShape(2, 1, 64), [(1, total), (1, 1), (total, total), (5, total)]))


@pytest.mark.parametrize("window", [63, 64, 65])
def test_windows_around_tiles(window: int) -> None:
    check(paged_batch(PagedShape(2, 1, 64), [(1, 127), (1, 128), (1, 129), (66, 200)]), window=window)


def test_one_long_decode_is_cut_into_many_runs() -> None:
    check(paged_batch(PagedShape(4, 1, 64), [(1, 2500)]))


def test_scores_that_overflow_a_plain_exponential() -> None:
    batch = paged_batch(PagedShape(2, 1, 64), [(1, 150), (40, 90)])
    check(batch, scale=30.0)


@pytest.mark.parametrize("requests", [DECODES, DECODES + CHUNKS])
def test_padded_requests_and_tokens(requests: Sequence[tuple[int, int]]) -> None:
    batch = paged_batch(PagedShape(4, 2, 64), requests, padding=3)
    batch.lengths["block_tables"][-3:] = 1 << 20
    if requests is DECODES:
        batch.lengths["num_decodes"] += 3
    padded = torch.cat((batch.q, poisoned(3, *batch.q.shape[1:], like=batch.q)))
    check(PagedBatch(padded, batch.k_cache, batch.v_cache, batch.lengths))


@pytest.mark.parametrize("num_decodes", [0, 1, 5])
def test_hints_bound_the_launch_and_nothing_else(num_decodes: int) -> None:
    batch = paged_batch(PagedShape(4, 2, 64), DECODES + CHUNKS, num_decodes=num_decodes)
    batch.lengths["max_query_len"], batch.lengths["max_seq_len"] = 70, 100_000
    check(batch)


def test_a_batch_of_chunks_under_the_hint_of_one_decode() -> None:
    check(paged_batch(PagedShape(4, 2, 64), CHUNKS, num_decodes=1))


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 50])
def test_layers_share_a_plan(window: int | None) -> None:
    requests = [*DECODES, *CHUNKS, (40, 300)]
    plan = plan_of(paged_batch(PagedShape(4, 2, 64), requests), window)
    for _ in range(3):
        check(paged_batch(PagedShape(4, 2, 64), requests), plan, window=window)


@pytest.mark.parametrize("scales", [(0.7, 2.5), (torch.tensor([0.7]), torch.tensor([2.5])), "per head"])
def test_cache_of_8_bit_floats(scales: Any) -> None:
    if scales == "per head":
        scales = torch.rand(2, 2) + 0.5
    shape = PagedShape(4, 2, 64, 16, torch.float32, torch.float8_e4m3fn)
    check(paged_batch(shape, DECODES + CHUNKS), k_scale=scales[0], v_scale=scales[1])


@pytest.mark.slow
def test_more_requests_than_are_summed_at_once() -> None:
    nothing = [(0, 0)] * 260
    check(paged_batch(PagedShape(1, 1, 16), [*nothing, (1, 9), (1, 200), (2, 30), (20, 20)], num_decodes=1))
