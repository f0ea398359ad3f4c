"""The sampler on a CUDA device: the tokens and scores of the CPU, and rows that are not numbers."""

from dataclasses import replace

import pytest
import torch

from tests.engine_core.sampling import reference
from tests.engine_core.sampling.conftest import Request, SamplerHarness
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling.tokens import INVALID_TOKEN

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")

REQUESTS = [
    Request(SamplingParams(temperature=0.0)),
    Request(SamplingParams(temperature=0.0, logprobs=3, presence_penalty=0.5), (1, 2), (3, 3, 4)),
    Request(SamplingParams(temperature=0.0, logit_bias={5: 4.0}, min_tokens=3), (1, 2), (3,), (6, 7)),
    Request(SamplingParams(allowed_token_ids=(4, 8, 30, 31), logprobs=0)),
    Request(SamplingParams(bad_words_token_ids=((4,), (3, 9)), repetition_penalty=1.2), (1,), (2, 3)),
    Request(SamplingParams()),
    *(Request(SamplingParams(temperature=0.8, **filters)) for filters in reference.FILTERS),
]


def harnesses(vocab_size: int) -> tuple[SamplerHarness, SamplerHarness]:
    num_slots = 4 * len(REQUESTS)
    made = SamplerHarness(vocab_size, num_slots, CUDA), SamplerHarness(vocab_size, num_slots, CPU)
    for slot in range(num_slots):
        request = REQUESTS[slot % len(REQUESTS)]
        for harness in made:
            harness.start(slot, replace(request, params=_seeded(request.params, slot)))
    return made


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed})


@pytest.mark.parametrize("vocab_size", [40, 700, 5003])
def test_tokens_and_scores_equal_the_cpu(vocab_size: int) -> None:
    on_cuda, on_cpu = harnesses(vocab_size)
    slots = range(on_cuda.num_slots)
    logits = torch.randn(len(slots), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    ours, theirs = on_cuda.sample(logits.cuda(), slots), on_cpu.sample(logits, slots)
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    torch.testing.assert_close(ours.logprobs.logprobs.cpu(), theirs.logprobs.logprobs, atol=1e-4, rtol=0)
    assert ours.logprobs.token_ids.cpu().equal(theirs.logprobs.token_ids)
    assert ours.logprobs.ranks.cpu().equal(theirs.logprobs.ranks)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocab_size", [40, 700])
def test_rows_that_are_not_numbers_harm_no_other(vocab_size: int, bad: float) -> None:
    harness, _ = harnesses(vocab_size)
    slots = range(harness.num_slots)
    logits = torch.randn(len(slots), vocab_size, generator=torch.Generator().manual_seed(0)).cuda() * 3
    good = harness.sample(logits, slots).token_ids.tolist()
    half = len(slots) // 2
    logits[:half] = bad
    tokens = harness.sample(logits, slots).token_ids.tolist()
    torch.cuda.synchronize()
    assert tokens == [INVALID_TOKEN] * half + good[half:]
