"""Scores of pairs of texts by a model for them, against transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.support.embedding_models import make_cross_encoder
from tests.support.server import Server, check_error, start_server
from tokenmill import LLM
from tokenmill_engine.errors import InvalidRequestError

pytestmark = pytest.mark.slow

QUERY = "What is the capital of France?"
DOCUMENTS = ["Bread needs flour.", "Paris is the capital of France, and has been for long.", "x", "word " * 60]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_cross_encoder(tmp_path_factory.mktemp("cross-encoder"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with start_server(str(model), "--device", "cpu") as server:
        yield server


@pytest.fixture(scope="module")
def logits(model: Path) -> Callable[..., list[float]]:
    """Of pairs of texts, cut to `max_length` tokens if they are longer."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    oracle = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()

    def compute(first: list[str], second: list[str], max_length: int = 128) -> list[float]:
        encoded = tokenizer(first, second, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            values: list[float] = oracle(**encoded).logits[:, 0].tolist()
        return values

    return compute


def sigmoid(values: list[float]) -> list[float]:
    return [float(value) for value in 1 / (1 + np.exp(-np.array(values)))]


def test_scores_are_those_of_transformers(server: Server, logits: Callable[..., list[float]]) -> None:
    expected = logits([QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert len({round(value, 2) for value in expected}) == len(DOCUMENTS)
    reply = server.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS).json()
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(sigmoid(expected), abs=1e-5)
    raw = server.post("/v1/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False).json()
    assert [entry["score"] for entry in raw["data"]] == pytest.approx(expected, abs=1e-4)
    pairs = server.post("/v1/score", text_1=DOCUMENTS[:2], text_2=DOCUMENTS[1:3]).json()
    expected = sigmoid(logits(DOCUMENTS[:2], DOCUMENTS[1:3]))
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx(expected, abs=1e-5)


def test_documents_are_ranked(server: Server, logits: Callable[..., list[float]]) -> None:
    expected = sigmoid(logits([QUERY] * len(DOCUMENTS), DOCUMENTS))
    results = server.post("/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=3).json()["results"]
    assert [entry["index"] for entry in results] == list(np.argsort(expected)[::-1][:3])
    assert [entry["relevance_score"] for entry in results] == pytest.approx(sorted(expected)[::-1][:3], abs=1e-5)


@pytest.mark.parametrize("limit", [12, 21, 40])
def test_the_longer_text_of_a_pair_is_cut_first(server: Server, logits: Callable[..., list[float]], limit: int) -> None:
    first, second = [QUERY, DOCUMENTS[3], DOCUMENTS[3]], [DOCUMENTS[3], QUERY, DOCUMENTS[3]]
    reply = server.post("/v1/score", text_1=first, text_2=second, truncate_prompt_tokens=limit).json()
    assert reply["usage"]["prompt_tokens"] == 3 * limit
    expected = sigmoid(logits(first, second, limit))
    assert [entry["score"] for entry in reply["data"]] == pytest.approx(expected, abs=1e-5)


def test_what_it_cannot_do(server: Server) -> None:
    assert "use /v1/score" in check_error(server.post("/v1/embeddings", input="x"), 400)["message"]
    check_error(server.post("/v1/completions", prompt="x"), 400)
    error = check_error(server.post("/v1/score", text_1=QUERY, text_2=["x", "word " * 130]), 400)
    assert (error["param"], error["code"]) == ("text_2", "context_length_exceeded")
    error = check_error(server.post("/v1/score", queries="word " * 130, documents=["x"]), 400)
    assert (error["param"], error["code"]) == ("queries", "context_length_exceeded")
    error = check_error(server.post("/v1/rerank", query=QUERY, documents=["x y"], truncate_prompt_tokens=3), 400)
    assert error["param"] == "truncate_prompt_tokens"


def test_what_has_no_effect_on_pairs_is_listed(server: Server) -> None:
    fields = {"query": QUERY, "documents": DOCUMENTS[:1]}
    cut = {"truncation_side": "left", "truncate_prompt_tokens": 9}
    reply = server.post("/v1/rerank", **fields, **cut, add_special_tokens=False)
    assert reply.headers["x-ignored-fields"] == "add_special_tokens, truncation_side"
    assert server.post("/v1/rerank", **fields, truncation_side="left").headers["x-ignored-fields"] == "truncation_side"
    asked = {"truncation_side": "right", "truncate_prompt_tokens": 9, "add_special_tokens": True}
    assert "x-ignored-fields" not in server.post("/v1/rerank", **fields, **asked).headers


def test_the_same_from_python(model: Path, logits: Callable[..., list[float]]) -> None:
    with LLM(model, device="cpu") as llm:
        scores = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        assert scores == pytest.approx(sigmoid(logits([QUERY] * len(DOCUMENTS), DOCUMENTS)), abs=1e-5)
        with pytest.raises(InvalidRequestError, match="use score"):
            llm.embed(["x"])
        with pytest.raises(InvalidRequestError, match="ids and images are not taken"):
            llm.score([[5, 6]], ["x"])
