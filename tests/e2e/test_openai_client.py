"""The official `openai` client against a running server with the embedded model and two API servers."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.support.server import PATIENCE_S, Server, wait_for
from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME

pytestmark = pytest.mark.slow

REFERENCE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8")
)
PET_PLEASE: list[Any] = [{"role": "user", "content": "Name a pet, as JSON."}]
GREEDY: dict[str, Any] = {"model": EMBEDDED_MODEL_NAME, "temperature": 0}


@pytest.fixture(scope="module")
def client(smollm_server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{smollm_server.url}/v1", api_key="none") as client:
        yield client


def conversation(case: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": case["prompt"]}]


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["prompt"][:20])
def test_chat_is_what_the_reference_model_says(client: OpenAI, case: dict[str, Any]) -> None:
    """Greedy text in float32, whole and streamed, and the counts of tokens."""
    limit = len(case["fp32_ids"])
    fields = {**GREEDY, "messages": conversation(case), "max_tokens": limit}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == case["fp32_text"]
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(case["prompt_ids"]), limit)

    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == case["fp32_text"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]].count(None) == len(chunks) - 2
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == limit
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_and_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [EMBEDDED_MODEL_NAME]
    assert client.models.retrieve(EMBEDDED_MODEL_NAME).id == EMBEDDED_MODEL_NAME
    whole = client.completions.create(
        **GREEDY, prompt=["The capital of France is", "2 + 2 ="], max_tokens=4, logprobs=2
    )
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert "Paris" in whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens is not None
    assert "".join(whole.choices[0].logprobs.tokens) == whole.choices[0].text
    pieces = client.completions.create(**GREEDY, prompt="The capital of France is", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text


def test_async_client_streams_side_by_side(smollm_server: Server, client: OpenAI) -> None:
    """Twelve streams at once, over both API servers, each as if it were alone."""
    cases = REFERENCE[:2] * 6

    async def stream(asynchronous: AsyncOpenAI, case: dict[str, Any]) -> str:
        limit = len(case["fp32_ids"])
        chunks = await asynchronous.chat.completions.create(
            **GREEDY, messages=conversation(case), max_tokens=limit, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{smollm_server.url}/v1", api_key="none") as asynchronous:
            return await asyncio.gather(*(stream(asynchronous, case) for case in cases))

    assert asyncio.run(run()) == [case["fp32_text"] for case in cases]


def test_errors_have_their_class_and_code(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=conversation(REFERENCE[0]))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(**GREEDY, prompt=[5] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(**{**GREEDY, "temperature": 9}, messages=conversation(REFERENCE[0]))
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as later:
        client.chat.completions.create(**GREEDY, messages=conversation(REFERENCE[0]), extra_body={"suffix": "x"})
    assert later.value.param == "suffix"


class Pet(BaseModel):
    name: str
    legs: int | None


@pytest.fixture(scope="module")
def pet(client: OpenAI) -> Pet:
    """What the model says of one without a stream."""
    answer = client.chat.completions.parse(**GREEDY, messages=PET_PLEASE, response_format=Pet, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed is not None
    return answer.choices[0].message.parsed


def test_an_object_is_parsed_while_it_comes(client: OpenAI, pet: Pet) -> None:
    asked = {**GREEDY, "messages": PET_PLEASE, "max_tokens": 200}
    with client.chat.completions.stream(**asked, response_format=Pet, stream_options={"include_usage": True}) as stream:
        events = list(stream)
    texts = [event.snapshot for event in events if event.type == "content.delta"]
    assert len(texts) > 3
    assert all(longer.startswith(shorter) for shorter, longer in itertools.pairwise(texts))
    (done,) = [event for event in events if event.type == "content.done"]
    final = stream.get_final_completion()
    assert done.parsed == final.choices[0].message.parsed == pet
    assert final.usage is not None
    assert final.usage.completion_tokens >= len(texts)


def test_the_async_client_parses_too(smollm_server: Server, pet: Pet) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": PET_PLEASE, "max_tokens": 200, "response_format": Pet}

    async def streamed(chats: Any) -> Pet | None:
        async with chats.stream(**asked) as stream:
            found: Pet | None = (await stream.get_final_completion()).choices[0].message.parsed
        return found

    async def run() -> tuple[Any, Pet | None]:
        async with AsyncOpenAI(base_url=f"{smollm_server.url}/v1", api_key="none") as asynchronous:
            chats = asynchronous.chat.completions
            whole, piecemeal = await asyncio.gather(chats.parse(**asked), streamed(chats))
        return whole.choices[0].message.parsed, piecemeal

    assert asyncio.run(run()) == (pet, pet)


def test_an_object_that_is_cut_is_none(client: OpenAI) -> None:
    """The client says so itself, with what had come."""
    asked = {**GREEDY, "messages": PET_PLEASE, "max_tokens": 4}
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        client.chat.completions.parse(**asked, response_format=Pet)
    assert cut.value.completion.usage is not None
    assert cut.value.completion.usage.completion_tokens == 4
    with (
        pytest.raises(openai.LengthFinishReasonError),
        client.chat.completions.stream(**asked, response_format=Pet) as stream,
    ):
        stream.get_final_completion()


def test_headers_and_the_names_of_requests(client: OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "messages": PET_PLEASE, "max_tokens": 2, "user": "me", "store": False}
    named = {"X-Request-Id": "my-request"}
    raw = client.chat.completions.with_raw_response.create(**asked, extra_headers=named)
    assert set(raw.headers["x-ignored-fields"].split(", ")) == {"user", "store"}
    assert raw.request_id == "my-request"
    answer = raw.parse()
    assert (answer.id, answer._request_id) == ("chatcmpl-my-request", "my-request")
    with client.chat.completions.with_streaming_response.create(**asked, stream=True, extra_headers=named) as streamed:
        lines = [line for line in streamed.iter_lines() if line]
        assert streamed.headers["x-request-id"] == "my-request"
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_a_client_that_waits_no_longer(smollm_server: Server, client: OpenAI) -> None:
    """It goes, and so does its request; trying again would not help, so it does not."""
    aborted = smollm_server.metric("request_success_total", finished_reason="abort")
    endless: dict[str, Any] = {**GREEDY, "prompt": "Once", "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=1, max_retries=0).completions.create(**endless)
    wait_for(
        lambda: smollm_server.metric("request_success_total", finished_reason="abort") == aborted + 1,
        PATIENCE_S,
        "the end of the request",
    )
    with pytest.raises(openai.InternalServerError) as late:
        client.completions.create(**endless, extra_headers={"X-Request-Timeout-Ms": "1000"})
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")
    smollm_server.check_idle()


def test_leaving_a_stream_ends_the_request(smollm_server: Server, client: OpenAI) -> None:
    aborted = smollm_server.metric("request_success_total", finished_reason="abort")
    fields: dict[str, Any] = {
        **GREEDY,
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "extra_body": {"ignore_eos": True},
    }
    with client.completions.create(**fields, stream=True) as stream:
        next(iter(stream))
    wait_for(
        lambda: smollm_server.metric("request_success_total", finished_reason="abort") == aborted + 1,
        PATIENCE_S,
        "the end of the request",
    )
    smollm_server.check_idle()
    smollm_server.check_alive()


def test_the_chat_command(smollm_server: Server) -> None:
    case = REFERENCE[0]
    command = [sys.executable, "-m", "tokenmill", "chat", "--url", f"{smollm_server.url}/v1", "--temperature", "0"]
    done = subprocess.run([*command, "-q", case["prompt"]], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, case["fp32_text"] + "\n")


def test_log_probabilities_of_tokens_that_are_named(tiny_server: Server) -> None:
    """They are those that the most likely tokens have as such."""
    body = {"prompt": "Once", "max_tokens": 3, "temperature": 0, "return_tokens_as_token_ids": True}
    likely = tiny_server.complete(**body, logprobs=3)["choices"][0]["logprobs"]["top_logprobs"]
    wanted = sorted({int(name.partition(":")[2]) for top in likely for name in top})
    named = tiny_server.complete(**body, logprobs=1, logprob_token_ids=wanted)["choices"][0]["logprobs"]["top_logprobs"]
    for top, all_named in zip(likely, named, strict=True):
        assert sorted(all_named) == sorted(f"token_id:{token_id}" for token_id in wanted)
        assert {name: all_named[name] for name in top} == pytest.approx(top, abs=1e-4)
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True}
    reply = tiny_server.post("/v1/chat/completions", **chat, logprob_token_ids=wanted[:2]).json()
    for entry in reply["choices"][0]["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 2
