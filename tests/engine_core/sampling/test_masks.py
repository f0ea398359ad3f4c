"""Rows that grammars bind beside rows that are free."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine_core.sampling.conftest import Request, SamplerHarness
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import TokenMasks
from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.device import DeviceSampler
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.tokens import INVALID_TOKEN

VOCAB_SIZE = 77
REQUESTS = [
    Request(SamplingParams(temperature=0.0)),
    Request(SamplingParams(seed=3)),
    Request(SamplingParams(seed=4, top_k=3, top_p=0.9)),
    Request(SamplingParams(temperature=0.0, frequency_penalty=1.0), (1,), (5, 5, 6)),
]


def masks_of(*allowed: list[int]) -> np.ndarray:
    words = np.zeros((len(allowed), -(-VOCAB_SIZE // 32)), np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def test_rows_of_a_plan_become_rows_that_sample() -> None:
    masks = TokenMasks(np.array([1, 4], np.int32), masks_of([1], [2]))
    found = SampleMasks.of(masks, np.array([0, 1, 4, 6]))
    assert found is not None
    assert found.rows.tolist() == [1, 2]
    assert SampleMasks.of(None, np.array([0])) is None


@pytest.mark.parametrize("others", [[5, 6, 76], [40]])
def test_bound_rows_sample_what_is_allowed_and_others_as_ever(
    make_harness: Callable[..., SamplerHarness], others: list[int]
) -> None:
    harness = make_harness(VOCAB_SIZE)
    for slot in range(8):
        harness.start(slot, REQUESTS[slot % 4])
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    free = harness.sample(logits, range(8)).token_ids
    masks = SampleMasks(np.arange(4, 8, dtype=np.int32), masks_of([0, 32, 64], others, others, others))
    slots = np.arange(8, dtype=np.int32)
    bound = harness.sampler.sample(logits.clone(), slots, 10, masks).token_ids
    assert bound[:4].equal(free[:4])
    assert int(bound[4]) == max((0, 32, 64), key=lambda token: float(logits[4, token]))
    assert {*bound[5:].tolist()} <= {*others}
    harness.sampler.load_masks(masks)
    again = harness.sampler.sample_on_device(logits.clone(), torch.from_numpy(slots), bits.ON_DEVICE)
    assert again.equal(bound)
    harness.sampler.load_masks(None)
    again = harness.sampler.sample_on_device(logits.clone(), torch.from_numpy(slots), bits.ON_DEVICE)
    assert again.equal(free)


def test_scores_are_those_before_masks(make_harness: Callable[..., SamplerHarness]) -> None:
    harness = make_harness(VOCAB_SIZE)
    harness.start(0, Request(SamplingParams(temperature=0.0, logprobs=2)))
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    masks = SampleMasks(np.zeros(1, np.int32), masks_of([9]))
    sampled = harness.sampler.sample(logits.clone(), np.zeros(1, np.int32), 10, masks)
    assert sampled.token_ids.tolist() == [9]
    assert sampled.logprobs is not None
    expected = logits.log_softmax(1)[0]
    torch.testing.assert_close(sampled.logprobs.logprobs[0], torch.cat((expected[9:10], expected.topk(2).values)))


def test_a_row_that_is_left_nothing_has_no_token(make_harness: Callable[..., SamplerHarness]) -> None:
    """As where `allowed_token_ids` has none of the tokens that the grammar allows."""
    harness = make_harness(VOCAB_SIZE)
    harness.start(0, Request(SamplingParams(temperature=0.0, allowed_token_ids=(1, 2))))
    harness.start(1, Request(SamplingParams(seed=0, allowed_token_ids=(1, 2))))
    masks = SampleMasks(np.arange(2, dtype=np.int32), masks_of([3], [3]))
    sampled = harness.sampler.sample(torch.randn(2, VOCAB_SIZE), np.arange(2, dtype=np.int32), 10, masks)
    assert sampled.token_ids.tolist() == [INVALID_TOKEN] * 2


def test_the_sampler_of_gpus_obeys_what_was_loaded_last() -> None:
    """Its kernels, interpreted."""
    harness = SamplerHarness(VOCAB_SIZE)
    for slot in range(4):
        harness.start(slot, REQUESTS[slot])
    sampler = DeviceSampler(harness.table, harness.tokens)
    logits = torch.randn(4, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    slots = torch.arange(4, dtype=torch.int32)

    def sample() -> list[int]:
        tokens: list[int] = sampler.sample(logits.clone(), slots, bits.ON_DEVICE).tolist()
        return tokens

    free = sample()
    sampler.load_masks(SampleMasks(np.array([1, 3], np.int32), masks_of([70], [0, 31])))
    bound = sample()
    assert (bound[0], bound[1], bound[2]) == (free[0], 70, free[2])
    assert bound[3] in (0, 31)
    sampler.load_masks(SampleMasks(np.array([0], np.int32), masks_of([71])))
    assert sample() == [71, *free[1:]]
    for _ in range(2):
        sampler.load_masks(None)
        assert sample() == free
