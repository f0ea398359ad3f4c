"""Made-up step plans for profiling, warming up and capturing graphs, before any request exists."""

import numpy as np

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import SlotStart, StepPlan

GREEDY = SamplingParams(temperature=0.0, seed=0)
MOST_MEMORY = SamplingParams(temperature=1.0, top_p=0.9, seed=0, logprobs=0, frequency_penalty=0.1)
"""Takes the ways through the sampler that need the most memory."""


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
                stop_token_ids=(),
            )
            for slot in range(num_reqs)
        ],
    )


_LARGEST_PREFILL = 8192
_LONGEST_PROMPT = 2048


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Tokens of the prefill steps whose time is taken at the start, ascending: 256, 512, ... up to the budget."""
    largest = min(max_num_batched_tokens, _LARGEST_PREFILL)
    sizes = [256 << power for power in range(6) if 256 << power < largest]
    return [*sizes, largest]


def prompt_lengths(num_tokens: int, max_model_len: int, max_num_seqs: int) -> tuple[int, int]:
    """(requests, tokens of each): a step of about `num_tokens` tokens of prompts no longer than usual."""
    tokens_each = min(num_tokens, _LONGEST_PROMPT, max_model_len)
    return min(num_tokens // tokens_each, max_num_seqs), tokens_each
