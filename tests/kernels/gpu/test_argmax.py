"""The argmax kernels in the interpreter."""

import pytest
import torch

from tokenmill_kernels.gpu.argmax import PIECE, argmax, reduce_pieces


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_first_largest_of_each_row(vocab_size: int) -> None:
    # Few different values, so that every row has ties.
    logits = torch.randint(-9, 9, (5, vocab_size)).float()
    logits[3] = float("-inf")
    logits[3, vocab_size // 2] = -1e38
    assert argmax(logits).tolist() == logits.argmax(1).tolist()


def test_rows_that_are_no_numbers_fail_alone() -> None:
    logits = torch.randn(6, PIECE + 100)
    expected = logits.argmax(1).tolist()
    logits[0, 3] = float("nan")
    logits[1, PIECE + 50] = float("nan")
    logits[3, 40] = float("inf")
    logits[4] = float("-inf")
    assert argmax(logits).tolist() == [-1, -1, expected[2], -1, -1, expected[5]]


def test_rows_may_have_a_stride() -> None:
    wide = torch.randn(4, 300)
    wide[:, 200:] = float("nan")
    assert argmax(wide[:, :200]).tolist() == wide[:, :200].argmax(1).tolist()


def test_reduce_pieces_takes_the_lowest_index_of_equal_values() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [0.0, float("nan"), 1.0], [float("-inf")] * 3])
    indices = torch.tensor([[5, 90, 40], [1, 2, 3], [1, 2, 3]], dtype=torch.int32)
    assert reduce_pieces(values, indices).tolist() == [40, -1, -1]
