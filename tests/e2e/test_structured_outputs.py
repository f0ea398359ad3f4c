"""Structured outputs over HTTP: what comes follows what was asked for, beside streams that are free."""

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
from openai import OpenAI

from tests.support.server import PATIENCE_S, Server, check_error, wait_for
from tokenmill import LLM, SamplingParams, StructuredOutputsParams
from tokenmill_engine.errors import InvalidRequestError

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["tall", "kind"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
}
MESSAGES = [{"role": "user", "content": "Describe a person as JSON."}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(smollm_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=smollm_server.url, timeout=120) as client:
        yield client


def generate(client: httpx.Client, chat: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """The choices."""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body: dict[str, Any] = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    response = client.post(path, json={**body, "max_tokens": 100, **fields})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def texts(client: httpx.Client, **fields: Any) -> list[str]:
    """Of choices that came to their end."""
    choices = generate(client, **fields)
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def random_sampling(chance: random.Random) -> dict[str, Any]:
    """Parameters of all kinds."""
    return {
        "temperature": chance.choice([0, 0.7, 1.5]),
        "top_p": chance.choice([1, 0.8]),
        "top_k": chance.choice([0, 20]),
        "presence_penalty": chance.choice([0, 1.5]),
        "repetition_penalty": chance.choice([1, 1.3]),
        "seed": chance.randrange(1000),
        "logit_bias": chance.choice([None, {"2": 20, "17": -5}]),
        "min_tokens": chance.choice([0, 3]),
        "logprobs": chance.choice([None, True]),
    }


@pytest.mark.parametrize("seed", range(4))
def test_any_sampling_follows(client: httpx.Client, seed: int) -> None:
    sampling = random_sampling(random.Random(seed))
    for schema in (PERSON, {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}):
        (text,) = texts(client, structured_outputs={"json": schema, "disable_any_whitespace": True}, **sampling)
        jsonschema.validate(json.loads(text), schema)
    assert set(texts(client, structured_outputs={"choice": ["red", "deep blue"]}, n=2, **sampling)) <= {
        "red",
        "deep blue",
    }
    (text,) = texts(client, structured_outputs={"regex": r"[A-C]{2,3}-\d{4}"}, **sampling)
    assert re.fullmatch(r"[A-C]{2,3}-\d{4}", text)


def test_choices_have_states_of_their_own(client: httpx.Client) -> None:
    regex = r"(one|two|three|four)( (one|two|three|four)){2}"
    found = texts(client, chat=False, structured_outputs={"regex": regex}, n=6, temperature=2, seed=5)
    assert all(re.fullmatch(regex, text) for text in found)
    assert len(set(found)) > 1


def test_the_fields_of_response_format(client: httpx.Client) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    (text,) = texts(client, response_format=schema, temperature=0)
    jsonschema.validate(json.loads(text), PERSON)
    (choice,) = generate(client, response_format={"type": "json_object"}, temperature=0)
    assert choice["message"]["content"].startswith("{")
    older = {"structures": [{"begin": "<p>", "schema": PERSON, "end": "</p>"}], "triggers": ["<p>"]}
    content = {"type": "json_schema", "json_schema": PERSON}
    newer = {"format": {"type": "tag", "begin": "<p>", "content": content, "end": "</p>"}}
    generate(client, response_format={"type": "structural_tag", **older}, temperature=0, max_tokens=8)
    (text,) = texts(client, response_format={"type": "structural_tag", **newer}, temperature=0)
    inner = re.fullmatch(r"<p>(.*)</p>", text, re.DOTALL)
    assert inner is not None
    jsonschema.validate(json.loads(inner[1]), PERSON)


def test_a_stream_says_the_same(client: httpx.Client, smollm_server: Server) -> None:
    fields: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 100, "model": "any"}
    with OpenAI(base_url=f"{smollm_server.url}/v1", api_key="none", max_retries=0) as official:
        fields["model"] = official.models.list().data[0].id
        body = {"structured_outputs": {"json": PERSON}}
        chunks = official.chat.completions.create(**fields, stream=True, extra_body=body)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert [streamed] == texts(client, structured_outputs={"json": PERSON}, temperature=0)


def test_the_end_is_put_off_but_not_denied(client: httpx.Client) -> None:
    """By `min_tokens` and `ignore_eos`."""
    letters = {"regex": "a*"}
    (choice,) = generate(client, structured_outputs=letters, ignore_eos=True, temperature=0, max_tokens=9)
    assert (choice["finish_reason"], set(choice["message"]["content"])) == ("length", {"a"})
    (text,) = texts(client, structured_outputs=letters, min_tokens=4, temperature=0, logit_bias={"2": 100})
    assert set(text) == {"a"}
    assert texts(client, structured_outputs={"choice": ["red"]}, min_tokens=50, ignore_eos=True) == ["red"]


def test_a_stop_string_and_a_limit_cut_it(client: httpx.Client) -> None:
    regex = {"regex": "abc xyz abc"}
    (choice,) = generate(client, structured_outputs=regex, stop=["xyz"])
    assert (choice["message"]["content"], choice["stop_reason"]) == ("abc ", "xyz")
    (choice,) = generate(client, structured_outputs=regex, max_tokens=1)
    assert choice["finish_reason"] == "length"
    assert "abc xyz abc".startswith(choice["message"]["content"])


def test_log_probabilities_are_those_of_the_model(client: httpx.Client) -> None:
    """Before masks: the likeliest tokens may be others than those that were allowed."""
    (choice,) = generate(client, structured_outputs={"choice": ["zebra"]}, logprobs=True, top_logprobs=2)
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith("zebra")
    assert entries[0]["token"] not in {top["token"] for top in entries[0]["top_logprobs"]}
    assert -50 < entries[0]["logprob"] < entries[0]["top_logprobs"][1]["logprob"]


@pytest.mark.parametrize(
    "wanted",
    [
        *({"regex": regex} for regex in ("[a", "(?<=x)y", "\\", "(a", "(a{1000}){1000}")),
        *({"json": {"type": "string", "pattern": pattern}} for pattern in ("[a", "(?<=x)y", "\\")),
        {"json": {"type": "no such type"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": {"$ref": "#/nowhere"}},
        {"grammar": "root ::= nothing"},
        {"grammar": "start: nothing"},
        {"structural_tag": {"format": {"type": "no such type"}}},
    ],
)
def test_what_makes_no_sense_is_refused(client: httpx.Client, wanted: dict[str, Any]) -> None:
    """Also where a stream was asked for."""
    for stream in (False, True):
        body = {"messages": MESSAGES, "structured_outputs": wanted, "stream": stream}
        error = check_error(client.post("/v1/chat/completions", json=body), 400)
        assert error["param"] == "structured_outputs"
    assert texts(client, structured_outputs={"choice": ["fine"]}) == ["fine"]


@pytest.mark.parametrize(
    ("field", "value"), [("allowed_token_ids", [5]), ("bad_words", ["zebra", "z", "ze", "zeb", "zebr"])]
)
def test_what_excludes_all_that_a_grammar_allows_is_to_blame(
    client: httpx.Client, field: str, value: list[Any]
) -> None:
    body = {"messages": MESSAGES, "structured_outputs": {"choice": ["zebra"]}, field: value}
    assert check_error(client.post("/v1/chat/completions", json=body), 400)["param"] == field


def hostile(depth: int) -> dict[str, Any]:
    """Half of the alternatives at each level are open until the end."""
    schema: dict[str, Any] = {"type": "string"}
    for level in range(depth):
        required = {"type": "object", "properties": {f"a{level}": schema}, "required": [f"a{level}"]}
        schema = {"oneOf": [required, {"type": "object", "properties": {f"b{level}": schema}}]}
    return schema


def test_hostile_schemas_hold_nobody_up(client: httpx.Client, smollm_server: Server) -> None:
    """Free streams go on to their end beside them, and others are answered."""
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    wide = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(3000)}}
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
        next(lines)
        for schema in (wide, {"oneOf": [hostile(9), {"type": "array", "uniqueItems": True}]}):
            answer = client.post(
                "/v1/chat/completions", json={"messages": MESSAGES, "structured_outputs": {"json": schema}}
            )
            error = check_error(answer, 400)
            assert error["param"] == "structured_outputs"
        assert json.loads([*lines][-1].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_many_hostile_schemas_hold_nobody_up(client: httpx.Client) -> None:
    """Each of them is refused, or asked to come again; ordinary ones pass them by."""
    patterns = [[f".*{number}{letter}.*" for letter in "abcdefghijklmnopqrst"] for number in range(8)]
    hostile = [{"json": {"allOf": [{"type": "string", "pattern": each} for each in some]}} for some in patterns]
    answered: list[int] = []

    def ask(index: int, wanted: dict[str, Any]) -> httpx.Response:
        body = {"messages": MESSAGES, "structured_outputs": wanted, "max_tokens": 1}
        response = client.post("/v1/chat/completions", json=body)
        answered.append(index)
        return response

    with ThreadPoolExecutor(12) as threads:
        asked = [threads.submit(ask, *each) for each in enumerate((*hostile, {"choice": ["A", "many"]}))]
        *refused, fine = [each.result() for each in asked]
    assert fine.status_code == 200, fine.text
    assert {response.status_code for response in refused} <= {400, 503}
    for index, response in enumerate(refused):
        if response.status_code == 400:
            assert answered.index(index) > answered.index(len(hostile))
        else:
            assert response.json()["error"]["code"] == "engine_unavailable"
            assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("2", "true")


def compiler_of(server: Server) -> psutil.Process:
    for process in server.descendants():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith("tokenmill: grammar compiler"):
                return process
    raise AssertionError("no compiler of grammars")


@pytest.mark.parametrize("stream", [False, True])
def test_who_met_the_end_of_a_compiler_may_try_again(client: httpx.Client, smollm_server: Server, stream: bool) -> None:
    for attempt in range(9):  # the compiler may end before it has been asked: then the next one is
        texts(client, structured_outputs={"regex": f"a{stream}{attempt}"})
        process = compiler_of(smollm_server)
        process.suspend()
        body = {"messages": MESSAGES, "structured_outputs": {"regex": f"b{stream}{attempt}"}, "stream": stream}
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.post, "/v1/chat/completions", json=body)
            wait_for(lambda: smollm_server.metric("num_requests_waiting") == 1, PATIENCE_S, "the request to wait")
            process.kill()
            response = waiting.result()
        if response.status_code != 200:
            break
    assert check_error(response, 503)["code"] == "engine_unavailable"
    assert (response.headers["retry-after"], response.headers["x-should-retry"]) == ("1", "true")
    assert texts(client, structured_outputs=body["structured_outputs"]) == [f"b{stream}{attempt}"]


def test_free_and_structured_requests_run_together(client: httpx.Client, smollm_server: Server) -> None:
    """Greedy ones say what they say alone."""
    free = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    bound = {**free, "max_tokens": 60, "structured_outputs": {"json": PERSON}}
    alone = [client.post("/v1/completions", json=body).json()["choices"][0]["text"] for body in (free, bound)]

    async def together() -> list[str]:
        async with httpx.AsyncClient(base_url=smollm_server.url, timeout=120) as many:
            answers = await asyncio.gather(*(many.post("/v1/completions", json=body) for body in [free, bound] * 6))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(together()) == alone * 6


def test_what_has_to_follow_is_not_sampled(client: httpx.Client, smollm_server: Server) -> None:
    """Which does not show in a stream, but for how it is cut, nor in the count of tokens."""
    person = {"properties": {"first_name": {"enum": ["Anna", "Bert"]}}, "required": ["first_name"], "type": "object"}
    wanted = {"json": person, "disable_any_whitespace": True}
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60, "structured_outputs": wanted}

    def forced() -> float:
        return smollm_server.metric("known_tokens_total")

    before = forced()
    whole = client.post("/v1/chat/completions", json=body).json()
    text = whole["choices"][0]["message"]["content"]
    jsonschema.validate(json.loads(text), person)
    at_once = forced() - before
    assert 3 <= at_once < whole["usage"]["completion_tokens"]
    streamed = client.post("/v1/chat/completions", json={**body, "stream": True, "logprobs": True})
    assert forced() == before + at_once
    assert "".join(contents(streamed.text)) == text
    streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
    assert forced() == before + 2 * at_once
    assert "".join(contents(streamed.text)) == text


def contents(stream: str) -> list[str]:
    """Of the chunks of one chat."""
    chunks = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]


def test_who_leaves_early(client: httpx.Client, smollm_server: Server) -> None:
    """Nothing is left of the request, whether it waits for its grammar or runs."""
    body = {"messages": MESSAGES, "structured_outputs": {"regex": "([a-z]{3} ){900}"}, "max_tokens": 2000}
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/chat/completions", json=body, timeout=0.1)
    smollm_server.check_idle()


def test_workers_that_share_a_model_obey(split_server: Server) -> None:
    """Each of them samples, and all sample the same."""
    prompt = {"prompt": PROMPT, "max_tokens": 40, "temperature": 1, "seed": 3}
    alone = split_server.post("/v1/completions", **prompt).json()["choices"][0]["text"]
    for _ in range(4):
        wanted = {"structured_outputs": {"regex": "[a-z]{2}-[0-9]{3}"}}
        text = split_server.post("/v1/completions", **prompt, **wanted).json()["choices"][0]["text"]
        assert re.fullmatch("[a-z]{2}-[0-9]{3}", text)
    assert split_server.post("/v1/completions", **prompt).json()["choices"][0]["text"] == alone


def test_from_python(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cpu", dtype="float32", kv_cache_memory_bytes="64M") as llm:
        wanted = [
            StructuredOutputsParams(choice=["red", "blue"]),
            StructuredOutputsParams(regex="[0-9]{4}"),
            StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
        ]
        sampling = [SamplingParams(max_tokens=300, seed=5, structured_outputs=each) for each in wanted]
        colour, number, person = (each.outputs[0].text for each in llm.generate([PROMPT] * 3, sampling, use_tqdm=False))
        assert colour in ("red", "blue")
        assert re.fullmatch("[0-9]{4}", number)
        jsonschema.validate(json.loads(person), PERSON)
        for wrong in (StructuredOutputsParams(), StructuredOutputsParams(regex="[a")):
            with pytest.raises(InvalidRequestError):
                llm.generate([PROMPT], SamplingParams(structured_outputs=wrong), use_tqdm=False)
