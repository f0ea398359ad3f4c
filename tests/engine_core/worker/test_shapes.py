"""The padded sizes of steps."""

import numpy as np
import pytest

from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.shapes import MAX_GRAPH_TOKENS, Ladder, chunk_shapes, exact_shape


def plan(counts: list[int], num_decodes: int) -> StepPlan:
    num_scheduled = np.array(counts, np.int32)
    samples = np.arange(len(counts)) < max(num_decodes, 1)
    slots = np.arange(len(counts), dtype=np.int32)
    return StepPlan(0, slots, num_scheduled, np.zeros_like(slots), samples, num_decodes)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 5, 100, 256, 1024, 2000])
@pytest.mark.parametrize("max_tokens", [1, 7, 40, 512, 8192])
def test_every_step_up_to_the_limit_fits_its_shape(max_num_seqs: int, max_tokens: int) -> None:
    max_num_seqs = min(max_num_seqs, max_tokens)
    ladder = Ladder(max_num_seqs, max_tokens)
    shapes = set(ladder.shapes())
    for num_reqs in range(1, max_num_seqs + 1):
        shape = ladder.padded(plan([1] * num_reqs, num_reqs))
        if num_reqs > 1024:
            assert shape is None
            continue
        assert shape in shapes
        assert shape is not None
        assert num_reqs <= shape.num_rows == shape.num_tokens == shape.num_decodes == shape.num_hidden
        assert shape.num_rows <= ladder.num_rows
        assert shape.max_query_len == 1
    for num_tokens in range(1, max_tokens + 1, 1 if max_tokens < 1000 else 37):
        for num_reqs in {1, min(2, num_tokens), min(num_tokens, max_num_seqs)}:
            if num_reqs > max_num_seqs:
                continue
            shape = ladder.padded(plan([num_tokens - num_reqs + 1] + [1] * (num_reqs - 1), 0))
            if num_tokens > MAX_GRAPH_TOKENS:
                assert shape is None
                continue
            assert shape in shapes
            assert shape is not None
            assert shape.num_tokens >= num_tokens
            assert shape.max_query_len >= num_tokens - num_reqs + 1
            assert num_reqs <= shape.num_rows <= ladder.num_rows
            assert shape.num_outputs == shape.num_hidden == min(shape.num_rows, ladder.sample_sizes[-1])
            # One of several: chunks and decodes are told apart on the device.
            assert shape.num_decodes == 1 < shape.num_rows


def test_more_rows_sample_than_a_graph_has() -> None:
    ladder = Ladder(max_num_seqs=1024, max_tokens=8192)
    assert ladder.padded(plan([1] * 512 + [5] * 10, 512)) is not None
    assert ladder.padded(plan([1] * 513 + [5] * 10, 513)) is None


def test_padding_is_small_and_graphs_are_few() -> None:
    ladder = Ladder(max_num_seqs=1024, max_tokens=8192)
    assert len(ladder.shapes()) <= 40
    for num_reqs in range(1, 513):
        padded = ladder.sample_size(num_reqs)
        assert padded is not None
        assert padded <= max(1.5 * num_reqs, num_reqs + 7)
    assert ladder.sample_size(513) is None
    for num_tokens in range(513, 2049):
        shape = ladder.padded(plan([num_tokens], 0))
        assert shape is not None
        assert shape.num_tokens < num_tokens + (128 if num_tokens <= 1024 else 256)


def test_largest_shapes_come_first() -> None:
    sizes = [shape.num_tokens for shape in Ladder(max_num_seqs=64, max_tokens=512).shapes()]
    assert sizes[0] == max(sizes) == 512
    assert sizes[-1] == 1
    assert {shape.num_tokens for shape in Ladder(max_num_seqs=64, max_tokens=512).largest_shapes()} == {512, 64}


def test_exact_shapes() -> None:
    assert exact_shape(plan([1, 1, 1], 3), 3) == Ladder(3, 64).padded(plan([1, 1, 1], 3))
    shape = exact_shape(plan([1, 9, 600], 1), 2)
    assert (shape.num_tokens, shape.num_rows, shape.num_decodes, shape.max_query_len) == (610, 3, 1, 600)
    assert shape.num_hidden == shape.num_outputs == 2
    assert exact_shape(plan([1, 9, 600], 1), None).num_hidden == 610


@pytest.mark.parametrize(("max_num_seqs", "max_tokens"), [(1, 8), (2, 40), (256, 2048)])
def test_examples_of_chunks_keep_to_the_limits(max_num_seqs: int, max_tokens: int) -> None:
    shapes = chunk_shapes(max_num_seqs, max_tokens)
    assert shapes
    for shape in shapes:
        assert shape.num_tokens == shape.num_decodes + shape.max_query_len <= max_tokens
        assert shape.num_rows == shape.num_decodes + 1 <= max_num_seqs
        assert shape.num_hidden == shape.num_tokens


def test_examples_of_chunks_have_few_decodes_beside_them_and_many() -> None:
    shapes = chunk_shapes(256, 2048)
    assert {shape.num_decodes for shape in shapes if shape.max_query_len == 2} == {0, 1, 48}
    assert {shape.num_decodes for shape in shapes if shape.max_query_len == 128} == {0, 1, 48}
