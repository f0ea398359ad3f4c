"""Requests of many kinds for tests of whole generations."""

import numpy as np

from tokenmill_engine.messages import SamplingParams

PROMPT_LENGTHS = [1, 2, 15, 16, 17, 31, 40, 77, 5, 64, 3, 100]
NUM_OUTPUT = 20


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 500, length).tolist() for length in PROMPT_LENGTHS]


SAMPLED = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, seed=2, top_p=0.9),
    SamplingParams(temperature=1.2, seed=3, top_k=20),
    SamplingParams(temperature=0.9, seed=4, min_p=0.05),
    SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.8, presence_penalty=0.3, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, seed=6, repetition_penalty=1.5),
    SamplingParams(temperature=1.0, seed=7, bad_words_token_ids=((40,), (41, 42)), min_tokens=5),
    SamplingParams(temperature=1.0, seed=8, allowed_token_ids=tuple(range(100, 160)), logprobs=3),
    SamplingParams(temperature=0.0, seed=9),
    SamplingParams(temperature=2.0, seed=10),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, seed=11, top_k=50, top_p=0.7, min_p=0.01, logprobs=0),
]
"""One for each prompt. Two have the same seed, and other prompts."""
