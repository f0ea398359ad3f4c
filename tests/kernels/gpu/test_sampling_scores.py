"""The score kernels in the interpreter."""

import pytest
import torch

from tokenmill_kernels.gpu.sampling_scores import score


@pytest.mark.slow
@pytest.mark.parametrize(("vocab_size", "num_top"), [(1, 1), (7, 3), (129, 129), (1000, 0), (5003, 20)])
def test_scores_match_a_log_softmax(vocab_size: int, num_top: int) -> None:
    logits = torch.randn(6, vocab_size) * 3
    own = torch.randint(0, vocab_size, (6,))
    own[0] = logits[0].argmax()
    token_ids, logprobs, ranks = score(logits, own, num_top)
    exact = logits.double().log_softmax(1)
    top = exact.topk(num_top, dim=1)
    assert torch.equal(token_ids, torch.cat((own[:, None], top.indices), dim=1).int())
    expected = torch.cat((exact.gather(1, own[:, None]), top.values), dim=1)
    torch.testing.assert_close(logprobs.double(), expected, atol=2e-6, rtol=0)
    assert ranks.tolist() == (1 + (logits > logits.gather(1, own[:, None])).sum(1)).tolist()


def test_of_equal_logits_the_lower_id_comes_first() -> None:
    logits = torch.zeros(2, 600)
    logits[1, [500, 30, 29]] = 1.0
    token_ids, _, ranks = score(logits, torch.tensor([599, 30]), 5)
    assert token_ids[:, 1:].tolist() == [[0, 1, 2, 3, 4], [29, 30, 500, 0, 1]]
    assert ranks.tolist() == [1, 1]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_are_no_distribution_have_no_scores() -> None:
    logits = torch.randn(4, 5003)
    own = torch.zeros(4, dtype=torch.int64)
    good = score(logits[3:], own[3:], 4)[1]
    logits[0, 4500] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    token_ids, logprobs, _ = score(logits, own, 4)
    assert logprobs[:3].isnan().all()
    assert torch.equal(logprobs[3:], good)
    assert ((token_ids >= 0) & (token_ids < 5003)).all()
