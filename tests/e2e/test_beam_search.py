"""Beam search against transformers, with the tiny model in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.server import Server

pytestmark = pytest.mark.slow

PROMPT = [40, 41, 42, 43, 44, 45]
WIDTH, LENGTH = 4, 12


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.generation_config.temperature = model.generation_config.top_p = model.generation_config.top_k = None
    return model


def up_to_end(token_ids: list[int], ends: list[int]) -> list[int]:
    """Without what fills the row up."""
    return token_ids[: min([position + 1 for position, each in enumerate(token_ids) if each in ends] or [LENGTH])]


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, -2.0, 3.0])
@pytest.mark.parametrize("early", [False, True])
def test_the_same_texts_as_transformers(tiny_server: Server, oracle: Any, length_penalty: float, early: bool) -> None:
    """The end tokens are ones that good beams come to."""
    greedy = tiny_server.complete(PROMPT, max_tokens=6, return_token_ids=True, ignore_eos=True)
    ends = sorted({greedy["choices"][0]["token_ids"][position] for position in (2, 5)})
    found = oracle.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=LENGTH,
        num_beams=WIDTH,
        num_return_sequences=WIDTH,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=early or "never",
        eos_token_id=ends,
        pad_token_id=0,
    )[:, len(PROMPT) :].tolist()
    fields = {"n": WIDTH, "max_tokens": LENGTH, "stop_token_ids": ends, "ignore_eos": True, "return_token_ids": True}
    beams = {"use_beam_search": True, "length_penalty": length_penalty, "early_stopping": early}
    choices = tiny_server.complete(PROMPT, **fields, **beams)["choices"]
    ours = [choice["token_ids"] for choice in choices]
    assert ours == [up_to_end(row, ends) for row in found]
    assert len({tuple(ids) for ids in ours}) == WIDTH
    for choice in choices:
        ended = choice["token_ids"][-1] in ends
        assert choice["finish_reason"] == ("stop" if ended else "length")
