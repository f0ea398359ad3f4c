"""The work list of attention, built in the interpreter: every tile once, evenly shared, the longest requests first."""

from collections.abc import Sequence

import pytest
import torch

from tokenmill_kernels.gpu.attention import plan_attention
from tokenmill_kernels.gpu.attention_plan import AttentionPlan, DecodePlan, PrefillPlan

HEADS, GROUP, HEAD_DIM = 2, 4, 64
MIXED = [(1, 40), (17, 17), (1, 1230), (33, 130), (0, 0), (1, 64), (200, 700), (1, 1), (2, 65)]


def planned(requests: Sequence[tuple[int, int]], num_decodes: int, window: int | None = None) -> AttentionPlan:
    """A plan for (new tokens, total tokens) pairs."""
    query_lens = [query for query, _ in requests]
    return plan_attention(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor([total for _, total in requests], dtype=torch.int32),
        num_tokens=sum(query_lens),
        num_decodes=num_decodes,
        max_query_len=max(*query_lens, 1),
        num_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float16,
        window=window,
    )


def decode_part(plan: AttentionPlan) -> DecodePlan:
    assert plan.decode is not None
    return plan.decode


def prefill_part(plan: AttentionPlan) -> PrefillPlan:
    assert plan.prefill is not None
    return plan.prefill


def tiles_of(total: int, block_n: int, window: int | None) -> int:
    first = 0 if window is None else max(total - window, 0) // block_n
    return -(-total // block_n) - first


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(
    "totals", [[1], [2500], [1088] * 4, [5, 700, 1, 1, 2000], [64] * 40, list(range(1, 2000, 97)), [9000, 3]]
)
def test_runs_are_even_and_hold_every_tile_once(totals: list[int], window: int | None) -> None:
    plan = decode_part(planned([(1, total) for total in totals], len(totals), window))
    runs = plan.runs.tolist()
    multiple = runs[0][1]
    padded = [-(-tiles_of(total, plan.block_n, window) // multiple) * multiple for total in totals]
    starts = [HEADS * sum(padded[:request]) for request in range(len(totals))]
    counts = [run[0] for run in runs]
    assert sum(counts) == HEADS * sum(padded)
    assert max(counts) <= max(-(-HEADS * sum(padded) // len(runs)) * 9 // 8, multiple)
    position = 0
    for count, _, request, place, token, seq_len, *_ in runs:
        if count:
            assert starts[request] + place == position
            assert 0 <= place < HEADS * padded[request]
            assert (token, seq_len) == (request, totals[request])
        position += count


@pytest.mark.parametrize("totals", [[2500], [1088] * 4, [5, 700, 1, 1, 2000], [9000, 3]])
def test_heads_that_are_cut_are_merged_once(totals: list[int]) -> None:
    plan = decode_part(planned([(1, total) for total in totals], len(totals)))
    runs = plan.runs.tolist()
    multiple, ends = runs[0][1], torch.tensor([run[0] for run in runs]).cumsum(0).tolist()
    expected = set()
    position = 0
    for request, total in enumerate(totals):
        tiles = tiles_of(total, plan.block_n, None)
        for head in range(HEADS):
            owners = [next(run for run, end in enumerate(ends) if position + tile < end) for tile in (0, tiles - 1)]
            if owners[0] != owners[1]:
                expected.add((*owners, request, head))
            position += -(-tiles // multiple) * multiple
    merged = [(run, *fields[6:9]) for run, fields in enumerate(runs) if fields[6] >= 0]
    assert set(merged) == expected
    assert len(merged) == len(expected)


def test_heads_are_whole_where_that_is_even() -> None:
    plan = decode_part(planned([(1, 600)] * 3, 3))
    runs = plan.runs.tolist()
    assert runs[0][1] > 1
    assert all(count in (0, runs[0][1]) for count, *_ in runs)


@pytest.mark.parametrize("num_decodes", [0, 1, 4])
def test_tiles_of_prefills_are_listed_by_request_and_from_the_last(num_decodes: int) -> None:
    plan = prefill_part(planned(MIXED, num_decodes))
    num_tiles, drawn = plan.num_tiles.tolist()
    shortest = 2 if num_decodes else 1
    longest_first = sorted(range(len(MIXED)), key=lambda request: -MIXED[request][1])
    expected = [
        [request, tile]
        for request in longest_first
        for tile in reversed(range(-(-MIXED[request][0] // plan.queries)))
        if MIXED[request][0] >= shortest
    ]
    assert drawn == 0
    assert plan.tiles[:num_tiles].tolist() == expected


def test_a_batch_of_one_kind_plans_nothing_for_the_other() -> None:
    assert planned([(1, 5)], 1).prefill is None
    assert planned([(5, 5)], 0).decode is None


def test_an_empty_batch_has_no_work() -> None:
    plan = planned([(0, 0), (0, 0)], 1)
    assert not decode_part(plan).runs[:, 0].any()
    assert int(prefill_part(plan).num_tiles[0]) == 0
