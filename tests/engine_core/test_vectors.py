"""Vectors of an engine core, against transformers in float32: text encoders, and decoders in chunks and after hits in
the prefix cache."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.embedding_models import tiny_bert
from tests.support.tiny_models import cached_tiny_model
from tests.support.vector_requests import NOTHING, Vector, decoder, encoder, relative_error, score, states, texts
from tokenmill_engine.config.pooling import PoolingKind
from tokenmill_engine.messages import FinishReason, SamplingParams

TOLERANCE = 1e-5


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_texts_of_all_lengths_in_one_batch(kind: PoolingKind) -> None:
    """More than there are slots, and more than fit into a step; the longest one fills it."""
    prompts = texts(1, 2, 3, 17, 18, 128, 40, 5, 77, 128, 1, 64)
    pooled: dict[PoolingKind, Callable[[Vector], Vector]] = {
        "mean": lambda hidden: hidden.mean(axis=0),
        "cls": lambda hidden: hidden[0],
        "last": lambda hidden: hidden[-1],
    }
    with encoder(kind) as requests:
        for number, prompt in enumerate(prompts):
            requests.add(number, prompt, NOTHING)
        told = requests.run()
    for each, prompt in zip(told, prompts, strict=True):
        assert (each.finishes, each.tokens) == ([FinishReason.STOP], [])
        assert relative_error(each.vectors[0], pooled[kind](states(tiny_bert(), prompt))) < TOLERANCE
        assert len(each.vectors) == 1


def test_scores_of_pairs() -> None:
    pairs = list(zip(texts(2, 17, 128, 40, 40), (1, 9, 100, 3, 37), strict=True))
    with encoder("cls", scores_pairs=True) as requests:
        for number, (prompt, second_text) in enumerate(pairs):
            requests.add(number, prompt, NOTHING, second_text)
        told = requests.run()
    expected = [score(*pair) for pair in pairs]
    assert len({round(each, 2) for each in expected}) == len(pairs)
    assert [float(each.vectors[0][0]) for each in told] == pytest.approx(expected, abs=1e-4)


def test_a_text_that_is_too_long_for_an_encoder_is_refused() -> None:
    with encoder() as requests:
        requests.add(0, texts(129)[0], NOTHING)
        requests.add(1, texts(128)[0], NOTHING)
        refused, taken = requests.run()
    assert (refused.finishes, refused.vectors) == ([FinishReason.ERROR], [])
    assert (taken.finishes, len(taken.vectors)) == ([FinishReason.STOP], 1)


def test_texts_are_aborted_while_they_wait_and_while_they_run() -> None:
    with encoder(num_slots=2) as requests:
        ids = [requests.add(number, prompt, NOTHING) for number, prompt in enumerate(texts(100, 100, 100, 100))]
        requests.core._fill_pipeline()
        for request_id in (ids[0], ids[3]):
            assert requests.core.scheduler.abort(request_id) is not None
        requests.run()
        assert {request_id for request_id in ids if requests.told[request_id].finishes} == {ids[1], ids[2]}
        assert requests.core.scheduler.load.kv_usage == 0


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("budget", [7, 512])
def test_the_last_state_of_a_decoder(family: Any, budget: int) -> None:
    """Whatever chunks it is computed in, and beside whatever others."""
    folder = cached_tiny_model(family)
    prompts = texts(1, 40, 64, 7, 8, 100)
    with decoder(folder, budget) as requests:
        for number, prompt in enumerate(prompts):
            requests.add(number, prompt, SamplingParams(max_tokens=5, temperature=0))  # there is nothing to sample
        told = requests.run()
    for each, prompt in zip(told, prompts, strict=True):
        assert (each.finishes, each.tokens) == ([FinishReason.STOP], [])
        assert relative_error(each.vectors[0], states(folder, prompt)[-1]) < TOLERANCE


def test_prefix_hits_change_nothing() -> None:
    folder = cached_tiny_model("qwen3")
    first, tail = texts(64, 9)
    prompts = [first, first + tail, first]
    with decoder(folder) as requests:
        told = []
        for number, prompt in enumerate(prompts):
            requests.add(number, prompt, NOTHING)
            told = requests.run()
    assert [each.num_cached for each in told] == [0, 64, 48]
    for each, prompt in zip(told, prompts, strict=True):
        assert relative_error(each.vectors[0], states(folder, prompt)[-1]) < TOLERANCE


def test_a_vector_that_is_not_numbers_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with decoder(cached_tiny_model("qwen3"), budget=512) as requests:
        runner: Any = requests.core._executor._worker._runner  # type: ignore[attr-defined]
        forward = runner._model.forward

        def broken(*args: Any, **options: Any) -> torch.Tensor:
            hidden: torch.Tensor = forward(*args, **options)
            hidden[0, 3] = float("nan")
            return hidden

        monkeypatch.setattr(runner._model, "forward", broken)
        for number, prompt in enumerate(texts(5, 6)):
            requests.add(number, prompt, NOTHING)
        failed, sound = requests.run()
    assert (failed.finishes, failed.vectors) == ([FinishReason.ERROR], [])
    assert "not made of numbers" in str(failed.messages[0])
    assert (sound.finishes, len(sound.vectors)) == ([FinishReason.STOP], 1)
