"""The official client, as users have it."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.echo_engine import POISON

MESSAGES = [{"role": "user", "content": "one two three four"}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer._request_id == answer.id.removeprefix("chatcmpl-")
    chunks = list(
        client.chat.completions.create(
            model=MODEL_NAME,
            messages=MESSAGES,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage == answer.usage


def test_accumulating_stream_with_logprobs(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=50, logprobs=True, top_logprobs=2, temperature=0
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= set(events)
    assert final.choices[0].logprobs is not None
    assert (
        final.choices[0].message.content
        == "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    assert len(final.choices[0].logprobs.content or []) == 20


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt=["a b", "c"], max_tokens=3, temperature=0, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["a ba", "ccc"]
    pieces = client.completions.create(model=MODEL_NAME, prompt="a b", max_tokens=3, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "a ba"
    assert [model.id for model in client.models.list()] == [MODEL_NAME, "other/name"]
    assert client.models.retrieve("other/name").id == "other/name"


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=9)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model=MODEL_NAME, prompt=[POISON], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, extra_body={"suffix": "x"})


@pytest.mark.slow
def test_keys() -> None:
    with run_server(api_keys=("secret",)) as server:
        options = {"base_url": f"{server.url}/v1", "max_retries": 0}
        with openai.OpenAI(api_key="secret", **options) as good:
            assert good.models.list().data
        with openai.OpenAI(api_key="wrong", **options) as bad, pytest.raises(openai.AuthenticationError) as caught:
            bad.models.list()
        assert caught.value.code == "invalid_api_key"


@pytest.mark.asyncio
async def test_asynchronous_client(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = await client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=8, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == answer.choices[0].message.content
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(model=MODEL_NAME, messages=[])
