"""Kernels for parts of a vocabulary in the interpreter."""

import pytest
import torch

from tokenmill_kernels import ops
from tokenmill_kernels.gpu.argmax import best_of_pieces, logit_pieces
from tokenmill_kernels.gpu.vocabulary import embedding_part, pick_best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 2048, 2049])
def test_rows_that_are_elsewhere_are_zeros(width: int, dtype: torch.dtype) -> None:
    weight = torch.randn(10, width).to(dtype)
    weight[[0, 9]] = float("nan")
    ids = torch.tensor([0, 19, 21, 28, 30, 2**30, 25], dtype=torch.int32)
    rows = embedding_part(ids, weight, 20)
    assert torch.equal(rows, ops.embedding_part(ids, weight, 20))
    assert torch.equal(rows[[2, 3, 6]], weight[[1, 8, 5]])
    assert not rows[[0, 1, 4, 5]].any()


def test_best_entries_are_counted_from_the_first_and_have_their_score() -> None:
    logits = torch.randn(5, 5000)
    logits[2, 40] = float("nan")
    pairs = best_of_pieces(*logit_pieces(logits), 100_000)
    expected = logits.argmax(dim=1) + 100_000
    expected[2] = -1
    assert pairs.dtype == torch.float32
    assert pairs[:, 1].tolist() == expected.tolist()
    scored = [0, 1, 3, 4]
    assert torch.equal(pairs[scored, 0], logits[scored].max(dim=1).values)


@pytest.mark.parametrize("num_members", [2, 3, 8])
def test_the_first_of_the_best_is_picked(num_members: int) -> None:
    # Few different scores, so that there are ties.
    scores = torch.randint(-3, 0, (40, num_members)).float()
    entries = torch.arange(num_members).float() * 50_000 + torch.arange(40).float()[:, None]
    pairs = torch.stack((scores, entries), dim=-1)
    pairs[3, -1] = torch.tensor([float("nan"), -1.0])
    pairs[4, 0] = torch.tensor([float("inf"), -1.0])
    chosen = pick_best(pairs)
    assert chosen.dtype == torch.int32
    assert torch.equal(chosen, ops.pick_best(pairs))
    assert chosen[3:5].tolist() == [-1, -1]
    winners = scores.argmax(dim=1)
    assert chosen[5:].tolist() == (winners * 50_000 + torch.arange(40))[5:].tolist()
