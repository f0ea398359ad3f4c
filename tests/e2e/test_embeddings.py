"""Embeddings over HTTP: a real text encoder and a decoder, against transformers."""

import asyncio
import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

from tests.support.embedding_models import MINILM, make_sentence_model
from tests.support.server import Server, check_error, start_server
from tests.support.tiny_models import END_OF_TEXT
from tokenmill import LLM
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError

pytestmark = pytest.mark.slow

Vectors = NDArray[np.float32]

TEXTS = [
    "Hello world",
    "The capital of France is Paris; a longer text follows, so that lengths differ.",
    "x",
    "Zürich, 東京, naïve café 🙂",
    " ".join(["word"] * 200),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_server(str(MINILM), "--device", "cpu", "--served-model-name", "minilm") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> Vectors:
    """Of `TEXTS`, as sentence-transformers makes them: the mean of the final states, brought to length 1."""
    tokenizer = AutoTokenizer.from_pretrained(MINILM)
    model = AutoModel.from_pretrained(MINILM, dtype=torch.float32).eval()
    encoded = tokenizer(TEXTS, padding=True, return_tensors="pt")
    mask = encoded["attention_mask"][..., None].float()
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    means = (hidden * mask).sum(1) / mask.sum(1)
    return np.asarray(torch.nn.functional.normalize(means, dim=1).numpy())


def vectors(answer: Any) -> Vectors:
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], dtype=np.float32)


def test_vectors_are_those_of_transformers(client: openai.OpenAI, expected: Vectors) -> None:
    """The client asks for base64 by itself."""
    answer = client.embeddings.create(model="minilm", input=TEXTS)
    np.testing.assert_allclose(vectors(answer), expected, rtol=0, atol=1e-5)
    assert answer.model == "minilm"
    num_tokens = sum(len(AutoTokenizer.from_pretrained(MINILM)(text).input_ids) for text in TEXTS)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    one = client.embeddings.create(model="minilm", input=TEXTS[1], encoding_format="float")
    np.testing.assert_allclose(vectors(one), expected[1:2], rtol=0, atol=1e-5)


def test_base64_is_little_endian_float32(server: Server, expected: Vectors) -> None:
    reply = server.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()
    values = np.frombuffer(base64.b64decode(reply["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(values, expected[0], rtol=0, atol=1e-5)


def test_token_ids_are_taken_as_they_are(client: openai.OpenAI, expected: Vectors) -> None:
    ids = AutoTokenizer.from_pretrained(MINILM)(TEXTS[:2]).input_ids
    one = client.embeddings.create(model="minilm", input=ids[0])
    several = client.embeddings.create(model="minilm", input=ids)
    np.testing.assert_allclose(vectors(one), expected[:1], rtol=0, atol=1e-5)
    np.testing.assert_allclose(vectors(several), expected[:2], rtol=0, atol=1e-5)


def test_fewer_dimensions_have_length_1_again(client: openai.OpenAI, expected: Vectors) -> None:
    cut = expected[:, :16] / np.linalg.norm(expected[:, :16], axis=1, keepdims=True)
    answer = client.embeddings.create(model="minilm", input=TEXTS, dimensions=16)
    np.testing.assert_allclose(vectors(answer), cut, rtol=0, atol=1e-5)


def test_texts_keep_their_ends_when_they_are_cut(client: openai.OpenAI) -> None:
    """As tokenizers cut them: [CLS] and [SEP] stay."""
    ids = AutoTokenizer.from_pretrained(MINILM)(TEXTS[1], truncation=True, max_length=7).input_ids
    cut = client.embeddings.create(model="minilm", input=TEXTS[1], extra_body={"truncate_prompt_tokens": 7})
    assert cut.usage.prompt_tokens == 7
    same = client.embeddings.create(model="minilm", input=ids)
    assert vectors(cut).tolist() == vectors(same).tolist()
    longest = client.embeddings.create(model="minilm", input=TEXTS[4] * 9, extra_body={"truncate_prompt_tokens": -1})
    assert longest.usage.prompt_tokens == 256


def test_many_requests_at_once(server: Server, expected: Vectors) -> None:
    """More than fit into a step, of many lengths."""

    async def ask() -> Sequence[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            calls = [client.embeddings.create(model="minilm", input=TEXTS * (1 + each % 5)) for each in range(24)]
            return await asyncio.gather(*calls)

    for each, answer in enumerate(asyncio.run(ask())):
        np.testing.assert_allclose(vectors(answer), np.tile(expected, (1 + each % 5, 1)), rtol=0, atol=1e-5)
    server.check_idle()


def test_what_is_counted(server: Server) -> None:
    names = ("prompt_tokens_total", "request_success_total", "generation_tokens_total")
    before = [server.metric(name) for name in names]
    assert server.post("/v1/embeddings", input=["a b c", "d"]).json()["usage"]["total_tokens"] == 8
    assert [server.metric(name) for name in names] == [before[0] + 8, before[1] + 2, before[2]]
    assert server.metric("request_success_total", finished_reason="stop") >= 2
    assert "Traceback" not in server.log  # of what only models that generate text need


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": [30522]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "word " * 300}, "input"),
        ({"input": [101] * 257}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 385}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens"),
        ({"input": "many words", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"input": "x", "normalize": True, "use_activation": False}, "use_activation"),
    ],
)
def test_what_is_wrong_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert check_error(server.post("/v1/embeddings", **fields), 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/embeddings", {"input": "x"}), ("/v1/score", {"text_1": "x", "text_2": "y"})]
)
def test_a_side_without_a_length_is_listed(server: Server, path: str, fields: dict[str, Any]) -> None:
    reply = server.post(path, **fields, truncation_side="left", user="me")
    assert reply.headers["x-ignored-fields"] == "truncation_side, user"
    reply = server.post(path, **fields, truncation_side="left", truncate_prompt_tokens=9)
    assert "x-ignored-fields" not in reply.headers


def test_scores_are_cosines(server: Server, expected: Vectors) -> None:
    reply = server.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()
    scores = [entry["score"] for entry in reply["data"]]
    np.testing.assert_allclose(scores, expected @ expected[0], rtol=0, atol=1e-5)
    assert [(entry["index"], entry["object"]) for entry in reply["data"]] == [(i, "score") for i in range(len(TEXTS))]
    pairs = server.post("/score", queries=TEXTS[:2], documents=TEXTS[1:3]).json()["data"]
    wanted = (expected[:2] * expected[1:3]).sum(axis=1)
    np.testing.assert_allclose([entry["score"] for entry in pairs], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked(server: Server, path: str) -> None:
    documents = ["A recipe for bread", {"text": "Paris is the capital of France"}, "Trains run on rails"]
    fields = {"query": "What is the capital of France?", "documents": documents}
    reply = server.post(path, **fields).json()
    assert reply["results"][0]["index"] == 1
    assert reply["results"][0]["document"] == {"text": "Paris is the capital of France"}
    scores = [entry["relevance_score"] for entry in reply["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 0.7 > scores[1]
    best = server.post(path, **fields, top_n=1, return_documents=False).json()
    assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(scores[0], abs=1e-5)}]
    assert best["usage"] == reply["usage"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": "x"}, "text_2"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": "z"}, "text_1"),
        ("/v1/score", {"queries": ["x", "y"], "documents": "z"}, "queries"),
        ("/v1/score", {"queries": "x", "documents": [1]}, "documents"),
        ("/v1/score", {"queries": "x", "documents": "word " * 300}, "documents"),
        ("/v1/score", {"text_1": "x", "text_2": []}, "text_2"),
        ("/v1/score", {"text_1": "x", "text_2": ["y", 1]}, "text_2"),
        ("/v1/score", {"text_1": "x", "text_2": "word " * 300}, "text_2"),
        ("/v1/rerank", {"documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": "y"}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": [{"image": "y"}]}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "x", "documents": ["y"] * 2049}, "documents"),
    ],
)
def test_what_is_wrong_with_pairs_is_named(server: Server, path: str, fields: dict[str, Any], param: str) -> None:
    assert check_error(server.post(path, **fields), 400)["param"] == param


def test_the_same_from_python(expected: Vectors) -> None:
    with LLM(MINILM, device="cpu") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        ours = np.array([output.outputs.embedding for output in outputs])
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
        (scored, other) = llm.score(TEXTS[0], TEXTS[1:3], use_tqdm=False)
        np.testing.assert_allclose(scored.outputs.score, float(expected[0] @ expected[1]), rtol=0, atol=1e-5)
        assert other.prompt_token_ids == outputs[0].prompt_token_ids + outputs[2].prompt_token_ids
        (cut,) = llm.embed([outputs[1].prompt_token_ids], dimensions=8, normalize=False, use_tqdm=False)
        assert len(cut.outputs.embedding) == 8
        ratio = np.array(cut.outputs.embedding) / expected[1, :8]
        np.testing.assert_allclose(ratio, ratio[0], rtol=1e-3)
        (whole, same) = llm.encode([TEXTS[0], outputs[1].prompt_token_ids], pooling_task="embed", use_tqdm=False)
        assert whole.outputs.data.dtype == np.float32
        np.testing.assert_allclose([whole.outputs.data, same.outputs.data], ours[:2], rtol=0, atol=1e-6)
        assert same.prompt_token_ids == outputs[1].prompt_token_ids
        for task in (None, "token_embed", "score"):
            with pytest.raises(InvalidRequestError, match=r"pooling_task.* there is 'embed'"):
                llm.encode(["x"], pooling_task=task)
        with pytest.raises(InvalidRequestError, match="use embed or score"):
            llm.generate(["x"])
        with pytest.raises(InvalidRequestError, match="use embed or score"):
            llm.chat([{"role": "user", "content": "x"}])
        with pytest.raises(InvalidRequestError, match="dimensions"):
            llm.embed(["x"], dimensions=0)
        with pytest.raises(InvalidRequestError, match="no pairs"):
            llm.score(["x", "y"], ["z"])
        with pytest.raises(ContextLengthError, match="prompt 1: "):
            llm.embed(["x", "word " * 300])


def test_a_decoder_that_was_made_for_vectors(tmp_path: Path) -> None:
    """As Qwen3-Embedding is published: the state of the end token that the tokenizer adds. Its files say what it is."""
    make_sentence_model(tmp_path, {"pooling_mode_lasttoken": True}, headless=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with LLM(tmp_path, device="cpu", dtype="float32", kv_cache_memory_bytes="64M", max_num_batched_tokens=64) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    for output, text in zip(outputs, TEXTS, strict=True):
        ids = tokenizer(text).input_ids
        assert output.prompt_token_ids == ids
        assert ids[-1] == tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0, -1]
        wanted = torch.nn.functional.normalize(hidden, dim=0).numpy()
        np.testing.assert_allclose(output.outputs.embedding, wanted, rtol=0, atol=1e-5)


def test_an_encoder_generates_no_text(server: Server) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        error = check_error(server.post(path, **fields), 400)
        assert error["code"] == "unsupported_model"
        assert "/v1/embeddings" in error["message"]


def test_the_model_is_listed_with_its_length(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert (model.id, model.model_extra["max_model_len"]) == ("minilm", 256)  # type: ignore[index]


def test_a_model_of_text_says_how_it_would_embed(tiny_server: Server) -> None:
    error = check_error(tiny_server.post("/v1/embeddings", input="x"), 400)
    assert error["code"] == "unsupported_model"
    assert "--runner pooling" in error["message"]
