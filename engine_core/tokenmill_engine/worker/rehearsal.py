"""Made-up step plans for profiling, warming up and capturing graphs, before any request exists."""

from dataclasses import dataclass

import numpy as np

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import SlotStart, StepPlan

GREEDY = SamplingParams(temperature=0.0, seed=0)
MOST_MEMORY = SamplingParams(temperature=1.0, top_p=0.9, seed=0, logprobs=0, frequency_penalty=0.1)
"""Takes the ways through the sampler that need the most memory."""
_EDITED = SamplingParams(
    temperature=0.0,
    seed=0,
    repetition_penalty=1.1,
    logprobs=1,
    prompt_logprobs=1,
    allowed_token_ids=(0, 1, 2),
    logit_bias={0: 1.0},
    min_tokens=1,
    bad_words_token_ids=((0, 0), (1,)),
)
_SCORED = SamplingParams(temperature=1.0, seed=0, logprobs=1)
UNUSUAL = (_EDITED, _SCORED)
"""Between them they ask for all that graphs cannot sample."""
_UNUSUAL_PROMPT = 8


def rehearsal_plan(
    num_reqs: int, tokens_each: int, num_groups: int, block_size: int, sampling: SamplingParams
) -> StepPlan:
    """`num_reqs` new requests in the first slots, each with a prompt of `tokens_each` tokens, computed at once.

    All of their blocks are block 0: a real request overwrites what they leave there before it reads it.
    """
    num_blocks = -(-tokens_each // block_size)
    token_ids = np.zeros(tokens_each, np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(num_reqs, dtype=np.int32),
        num_scheduled=np.full(num_reqs, tokens_each, np.int32),
        num_computed=np.zeros(num_reqs, np.int32),
        samples=np.ones(num_reqs, np.bool_),
        num_decodes=num_reqs if tokens_each == 1 else 0,
        starts=[
            SlotStart(
                slot=slot,
                request_id=slot,
                token_ids=token_ids,
                num_prompt_tokens=tokens_each,
                num_computed_tokens=0,
                block_ids=tuple([0] * num_blocks for _ in range(num_groups)),
                sampling=sampling,
                stop_token_ids=(0,),
            )
            for slot in range(num_reqs)
        ],
    )


_LARGEST_PREFILL = 8192
_PROMPT_LEN = 256


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Tokens of the prefill steps whose time is taken at the start, ascending: 256, 512, ... up to the budget."""
    largest = min(max_num_batched_tokens, _LARGEST_PREFILL)
    sizes = [256 << power for power in range(6) if 256 << power < largest]
    return [*sizes, largest]


def prompt_lengths(num_tokens: int, max_model_len: int, max_num_seqs: int) -> tuple[int, int]:
    """(requests, tokens of each): a step of about `num_tokens` tokens. Prompts are short and as long for every size, as
    far as the limits allow, so that sizes differ in the number of tokens and not in how much attention each one needs.
    """
    tokens_each = min(max(_PROMPT_LEN, num_tokens // max_num_seqs), num_tokens, max_model_len)
    return min(num_tokens // tokens_each, max_num_seqs), tokens_each


@dataclass(frozen=True, slots=True)
class RehearsalPlans:
    """The plans of one engine, within its limits."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_groups: int
    block_size: int

    def prefills(self) -> list[StepPlan]:
        """Steps of nothing but prompts, largest first."""
        shapes = [
            prompt_lengths(size, self.max_model_len, self.max_num_seqs)
            for size in reversed(prefill_sizes(self.max_num_batched_tokens))
        ]
        return [self._plan(num_reqs, tokens_each, GREEDY) for num_reqs, tokens_each in dict.fromkeys(shapes)]

    def largest(self) -> StepPlan:
        """The step that needs the most memory."""
        num_reqs = min(self.max_num_seqs, self.max_num_batched_tokens)
        tokens_each = min(self.max_num_batched_tokens // num_reqs, self.max_model_len)
        return self._plan(num_reqs, tokens_each, MOST_MEMORY)

    def unusual(self) -> list[StepPlan]:
        """Small steps, each of a prompt with one of `UNUSUAL`."""
        num_tokens = min(_UNUSUAL_PROMPT, self.max_num_batched_tokens, self.max_model_len)
        return [self._plan(1, num_tokens, sampling) for sampling in UNUSUAL]

    def _plan(self, num_reqs: int, tokens_each: int, sampling: SamplingParams) -> StepPlan:
        return rehearsal_plan(num_reqs, tokens_each, self.num_groups, self.block_size, sampling)
