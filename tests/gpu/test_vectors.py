"""Vectors on a CUDA device, in float32 against transformers on the CPU: a random BERT, and a random Qwen3 in chunks and
after hits in the prefix cache."""

import pytest

from tests.support.embedding_models import tiny_bert
from tests.support.tiny_models import cached_tiny_model
from tests.support.vector_requests import NOTHING, decoder, encoder, relative_error, score, states, texts
from tokenmill_engine.config.pooling import PoolingKind
from tokenmill_engine.messages import FinishReason

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

TOLERANCE = 5e-3


@pytest.mark.parametrize("kind", ["mean", "cls", "last"])
def test_an_encoder(kind: PoolingKind) -> None:
    prompts = texts(1, 2, 3, 17, 18, 128, 40, 5, 77, 128, 1, 64)
    with encoder(kind, device="cuda") as requests:
        for number, prompt in enumerate(prompts):
            requests.add(number, prompt, NOTHING)
        told = requests.run()
    for each, prompt in zip(told, prompts, strict=True):
        hidden = states(tiny_bert(), prompt)
        expected = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[kind]
        assert each.finishes == [FinishReason.STOP]
        assert relative_error(each.vectors[0], expected) < TOLERANCE


def test_scores_of_pairs() -> None:
    pairs = list(zip(texts(2, 17, 128, 40, 40), (1, 9, 100, 3, 37), strict=True))
    with encoder("cls", device="cuda", scores_pairs=True) as requests:
        for number, (prompt, second_text) in enumerate(pairs):
            requests.add(number, prompt, NOTHING, second_text)
        told = requests.run()
    expected = [score(*pair) for pair in pairs]
    assert len({round(each, 2) for each in expected}) == len(pairs)
    assert [float(each.vectors[0][0]) for each in told] == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("budget", [16, 512])
def test_a_decoder(budget: int) -> None:
    folder = cached_tiny_model("qwen3")
    first, tail, other = texts(64, 9, 40)
    prompts = [first, other, first + tail, first]
    with decoder(folder, budget, device="cuda") as requests:
        requests.add(0, prompts[0], NOTHING)
        requests.run()
        for number, prompt in enumerate(prompts[1:], 1):
            requests.add(number, prompt, NOTHING)
        told = requests.run()
    assert [each.num_cached for each in told] == [0, 0, 64, 48]
    for each, prompt in zip(told, prompts, strict=True):
        assert (each.finishes, each.tokens) == ([FinishReason.STOP], [])
        assert relative_error(each.vectors[0], states(folder, prompt)[-1]) < TOLERANCE
