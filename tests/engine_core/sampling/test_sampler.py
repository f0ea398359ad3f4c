"""The whole sampler: order of the stages, distribution, reproducibility, bad rows."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine_core.sampling import reference
from tests.engine_core.sampling.conftest import Request, SamplerHarness
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling.tokens import INVALID_TOKEN

MakeHarness = Callable[..., SamplerHarness]

GREEDY_CASES = {
    "plain": Request(SamplingParams(temperature=0.0)),
    "bad words of very different lengths": Request(
        SamplingParams(temperature=0.0, bad_words_token_ids=((6,), (*range(1, 20), 5), (*range(2, 20), 9), (0,) * 40)),
        (0, 1),
        tuple(range(1, 20)),
    ),
    "bias": Request(SamplingParams(temperature=0.0, logit_bias={5: 100.0, 9: -100.0})),
    "allowed": Request(SamplingParams(temperature=0.0, allowed_token_ids=(4, 8, 8, 30))),
    "allowed and bias": Request(SamplingParams(temperature=0.0, allowed_token_ids=(4, 8), logit_bias={9: 50.0})),
    "repetition": Request(SamplingParams(temperature=0.0, repetition_penalty=1.9), (3, 3, 4), (7, 8, 7)),
    "repetition below one": Request(SamplingParams(temperature=0.0, repetition_penalty=0.3), (3, 3, 4), (7, 8)),
    "frequency": Request(SamplingParams(temperature=0.0, frequency_penalty=1.5), (3, 3), (7, 8, 7, 7)),
    "presence": Request(SamplingParams(temperature=0.0, presence_penalty=-2.0), (3, 3), (7, 8, 7, 7)),
    "all penalties": Request(
        SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=-0.7, repetition_penalty=1.3),
        tuple(range(10)),
        (1, 1, 2, 20, 20, 21),
    ),
    "penalties without output": Request(SamplingParams(temperature=0.0, presence_penalty=2.0), (11, 12)),
    "min_tokens not reached": Request(SamplingParams(temperature=0.0, min_tokens=3), (1,), (2, 3), (6, 10)),
    "min_tokens reached": Request(SamplingParams(temperature=0.0, min_tokens=2), (1,), (2, 3), (6, 10)),
    "bad words": Request(
        SamplingParams(temperature=0.0, bad_words_token_ids=((6,), (7, 8, 9), (8, 13), (1, 7, 8, 14), (9, 15))),
        (1,),
        (7, 8),
    ),
    "bad words do not look into the prompt": Request(
        SamplingParams(temperature=0.0, bad_words_token_ids=((1, 7, 9), (7, 9))), (0, 1), (7,)
    ),
    "everything": Request(
        SamplingParams(
            temperature=0.0,
            allowed_token_ids=tuple(range(2, 35)),
            bad_words_token_ids=((20,), (2, 21)),
            logit_bias={3: 4.0, 22: -3.0},
            min_tokens=9,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
        ),
        (5, 6),
        (2, 2),
        (30, 31),
    ),
}


def expected_logits(logits: torch.Tensor, request: Request) -> np.ndarray:
    return reference.edited_logits(
        logits.double().numpy(), request.params, request.prompt, request.output, request.stop_token_ids
    )


@pytest.mark.parametrize("name", GREEDY_CASES)
def test_greedy_choice_after_edits_matches_the_reference(make_harness: MakeHarness, name: str) -> None:
    harness = make_harness(vocab_size=40)
    request = GREEDY_CASES[name]
    harness.start(3, request)
    for trial in range(40):
        logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(trial)) * 3
        token = harness.sample(logits, [3]).token_ids.tolist()
        assert token == [int(expected_logits(logits[0], request).argmax())]


def test_a_mixed_batch_gives_each_row_what_it_gets_alone(make_harness: MakeHarness) -> None:
    harness = make_harness(vocab_size=40, num_slots=40)
    requests = list(GREEDY_CASES.values())
    requests += [
        Request(SamplingParams(seed=11)),
        Request(SamplingParams(seed=12, temperature=0.7, top_p=0.8), (1,), (2, 3)),
        Request(SamplingParams(seed=13, temperature=1.3, top_k=5, logprobs=3)),
        Request(SamplingParams(seed=14, temperature=0.9, min_p=0.1, frequency_penalty=1.0), (1, 2), (3, 3, 4)),
        Request(SamplingParams(seed=15, temperature=0.9, logit_bias={7: 2.0})),
    ]
    order = np.random.default_rng(0).permutation(len(requests))
    for slot, index in enumerate(order):
        harness.start(slot, requests[index])
    slots = [int(slot) for slot in np.random.default_rng(1).permutation(len(requests))]
    logits = torch.randn(len(slots), 40, generator=torch.Generator().manual_seed(5)) * 3
    together = harness.sample(logits, slots).token_ids.tolist()
    for row, slot in enumerate(slots):
        alone = harness.sample(logits[row : row + 1], [slot]).token_ids.tolist()
        assert alone == [together[row]], requests[order[slot]]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_p": 0.7},
        {"top_k": 6},
        {"min_p": 0.15},
        {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.4, "top_p": 0.95},
    ],
    ids=str,
)
def test_tokens_follow_the_reference_distribution(make_harness: MakeHarness, params: dict[str, float]) -> None:
    vocab_size, num_rows = 300, 20_000
    harness = make_harness(vocab_size=vocab_size, num_slots=num_rows)
    request = Request(SamplingParams(**params), (1, 2), (3, 3, 4))
    for slot in range(num_rows):
        harness.start(slot, Request(SamplingParams(seed=slot, **params), (1, 2), (3, 3, 4)))
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    sampled = harness.sample(row.expand(num_rows, -1).contiguous(), range(num_rows))
    counts = np.bincount(sampled.token_ids.numpy(), minlength=vocab_size)
    reference.expect_frequencies(counts, reference.distribution(expected_logits(row, request), request.params))


def test_a_seed_reproduces_in_any_slot_and_batch(make_harness: MakeHarness) -> None:
    vocab_size = 1000
    params = SamplingParams(seed=77, temperature=0.9, top_p=0.9)
    logits = torch.randn(30, vocab_size, generator=torch.Generator().manual_seed(8)) * 2

    def run(slot: int, others: int) -> list[int]:
        harness = make_harness(vocab_size=vocab_size)
        harness.start(slot, Request(params))
        for other in range(others):
            harness.start(10 + other, Request(SamplingParams(seed=other, temperature=1.5, top_k=3 * other)))
        tokens: list[int] = []
        for step in range(30):
            batch = torch.cat((torch.randn(others, vocab_size), logits[step : step + 1]))
            result = harness.sample(batch, [*range(10, 10 + others), slot])
            token = int(result.token_ids[-1])
            length = int(harness.tokens.num_tokens[slot])
            harness.tokens.token_ids[slot, length] = token
            harness.tokens.num_tokens[slot] += 1
            tokens.append(token)
        return tokens

    first = run(0, 0)
    assert len(set(first)) > 5
    assert run(5, 3) == first
    assert run(2, 6) == first


def test_output_position_counts_from_the_end_of_the_prompt(make_harness: MakeHarness) -> None:
    """After a preemption the output is part of the known tokens; the prompt's length is not changed by it."""
    harness = make_harness(vocab_size=500)
    logits = torch.randn(1, 500)
    harness.start(0, Request(SamplingParams(seed=5), prompt=(1, 2, 3), output=(4, 5)))
    harness.start(1, Request(SamplingParams(seed=5), prompt=(9,), output=(4, 5)))
    harness.start(2, Request(SamplingParams(seed=5), prompt=(1, 2, 3), output=(4,)))
    same = harness.sample(logits.expand(3, -1).contiguous(), [0, 1, 2]).token_ids.tolist()
    assert same[0] == same[1] != same[2]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"logprobs": 2}], ids=str)
def test_a_bad_row_harms_no_other(make_harness: MakeHarness, bad: float, params: dict[str, float]) -> None:
    harness = make_harness(vocab_size=300)
    for slot in range(3):
        harness.start(slot, Request(SamplingParams(seed=slot, **params)))
    logits = torch.randn(3, 300)
    good = harness.sample(logits, [0, 1, 2]).token_ids.tolist()
    logits[1, 17] = bad
    assert harness.sample(logits, [0, 1, 2]).token_ids.tolist() == [good[0], INVALID_TOKEN, good[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_allowed_token_is_invalid(make_harness: MakeHarness, temperature: float) -> None:
    harness = make_harness(vocab_size=50)
    params = SamplingParams(seed=0, temperature=temperature, allowed_token_ids=(7,), bad_words_token_ids=((7,),))
    harness.start(0, Request(params))
    harness.start(1, Request(SamplingParams(seed=0, temperature=temperature)))
    tokens = harness.sample(torch.randn(2, 50), [0, 1]).token_ids.tolist()
    assert tokens[0] == INVALID_TOKEN
    assert tokens[1] != INVALID_TOKEN


def test_a_slot_forgets_its_last_request(make_harness: MakeHarness) -> None:
    harness = make_harness(vocab_size=50)
    logits = torch.zeros(1, 50)
    logits[0, 7] = 1.0
    harness.start(0, Request(SamplingParams(temperature=0.0, logit_bias={3: 9.0}, logprobs=2)))
    first = harness.sample(logits, [0])
    assert first.token_ids.tolist() == [3]
    assert first.logprobs is not None
    harness.start(0, Request(SamplingParams(temperature=0.0)))
    second = harness.sample(logits, [0])
    assert second.token_ids.tolist() == [7]
    assert second.logprobs is None
