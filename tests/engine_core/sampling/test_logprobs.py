"""Reported log-probabilities are those of the raw logits."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine_core.sampling.conftest import Request, SamplerHarness
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling.logprobs import RawScores
from tokenmill_kernels.cpu import sampling as native

MakeHarness = Callable[..., SamplerHarness]


@pytest.mark.parametrize("natively", [True, False])
def test_scores_match_a_log_softmax(natively: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not natively:
        monkeypatch.setattr(native, "is_available", lambda: False)
    logits = torch.randn(20, 333, generator=torch.Generator().manual_seed(0)) * 3
    tokens = torch.randint(0, 333, (20,), generator=torch.Generator().manual_seed(1))
    scores = RawScores(logits).score(tokens, num_top=5)
    expected = logits.double().log_softmax(1)
    for row in range(20):
        order = expected[row].argsort(descending=True)
        assert scores.token_ids[row].tolist() == [int(tokens[row]), *order[:5].tolist()]
        np.testing.assert_allclose(
            scores.logprobs[row].numpy(), expected[row][scores.token_ids[row].long()].numpy(), atol=1e-5
        )
        assert scores.ranks[row] == order.tolist().index(int(tokens[row])) + 1


def test_without_top_tokens_only_the_own_token_is_reported() -> None:
    scores = RawScores(torch.zeros(2, 10)).score(torch.tensor([3, 4]), num_top=0)
    assert scores.token_ids.tolist() == [[3], [4]]
    assert scores.ranks.tolist() == [1, 1]
    np.testing.assert_allclose(scores.logprobs.numpy(), -np.log(10), rtol=1e-6)


def test_parameters_do_not_change_reported_values(make_harness: MakeHarness) -> None:
    harness = make_harness(vocab_size=60)
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(2)) * 2
    harness.start(0, Request(SamplingParams(temperature=0.0, logprobs=0, logit_bias={9: 100.0})))
    harness.start(1, Request(SamplingParams(temperature=0.0)))
    harness.start(2, Request(SamplingParams(temperature=0.3, seed=1, logprobs=4, top_k=1)))
    harness.start(3, Request(SamplingParams(temperature=0.0, logprobs=2, allowed_token_ids=(50,))))
    harness.start(4, Request(SamplingParams(temperature=0.0, logprobs=1, repetition_penalty=1.5), (1, 2), (3,)))
    sampled = harness.sample(logits, range(5))
    assert sampled.token_ids[0] == 9
    assert sampled.token_ids[3] == 50
    assert sampled.logprobs is not None
    assert sampled.logprob_rows is not None
    assert sampled.logprob_rows.tolist() == [0, 2, 3, 4]
    expected = logits.double().log_softmax(1)
    for i, row in enumerate([0, 2, 3, 4]):
        token = int(sampled.token_ids[row])
        assert sampled.logprobs.token_ids[i, 0] == token
        assert abs(sampled.logprobs.logprobs[i, 0].item() - expected[row, token].item()) < 1e-5
        top = expected[row].topk(4)
        assert sampled.logprobs.token_ids[i, 1:].tolist() == top.indices.tolist()


def test_greedy_batches_report_unchanged_logits_without_a_copy(make_harness: MakeHarness) -> None:
    harness = make_harness(vocab_size=60)
    harness.start(0, Request(SamplingParams(temperature=0.0, logprobs=1)))
    logits = torch.randn(1, 60)
    sampled = harness.sample(logits, [0])
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_ids[0, 0] == sampled.logprobs.token_ids[0, 1] == logits.argmax()
    assert sampled.logprobs.ranks.tolist() == [1]


@pytest.mark.parametrize("natively", [True, False])
def test_tokens_that_requests_name_take_the_place_of_the_most_likely(
    natively: bool, make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not natively:
        monkeypatch.setattr(native, "is_available", lambda: False)
    harness = make_harness(vocab_size=60)
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(3)) * 2
    harness.start(0, Request(SamplingParams(temperature=0.0, logprobs=1)))
    harness.start(1, Request(SamplingParams(temperature=0.0, logprobs=2, logprob_token_ids=(7, 59, 0))))
    harness.start(2, Request(SamplingParams(temperature=0.0, logprob_token_ids=(7,))))  # asks for no log-probabilities
    harness.start(3, Request(SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(4,), logit_bias={9: 99.0})))
    sampled = harness.sample(logits, range(4))
    assert sampled.logprobs is not None
    assert sampled.logprob_rows is not None
    assert sampled.logprob_rows.tolist() == [0, 1, 3]
    expected = logits.double().log_softmax(1)
    names = [[int(logits[0].argmax())] * 2, [int(logits[1].argmax()), 7, 59, 0], [9, 4]]
    for entry, (row, token_ids) in enumerate(zip((0, 1, 3), names, strict=True)):
        assert sampled.logprobs.token_ids[entry, : len(token_ids)].tolist() == token_ids
        values = sampled.logprobs.logprobs[entry, : len(token_ids)].numpy()
        np.testing.assert_allclose(values, expected[row][token_ids].numpy(), atol=1e-5)
    harness.start(1, Request(SamplingParams(temperature=0.0, logprobs=2)))
    again = harness.sample(logits[1:2], [1])
    assert again.logprobs is not None
    assert again.logprobs.token_ids[0, 1:].tolist() == logits[1].topk(2).indices.tolist()
