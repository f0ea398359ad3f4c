"""litellm, by its general provider for OpenAI's API and the one for servers like this."""

import asyncio
import json
from typing import Any

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module", params=["openai", "hosted_vllm"])
def options(request: pytest.FixtureRequest, endpoint: Any) -> dict[str, Any]:
    name = f"{request.param}/{endpoint.model}"
    return {"model": name, "api_base": endpoint.url, "api_key": endpoint.key, "temperature": 0, "max_retries": 0}


def test_chat(options: dict[str, Any]) -> None:
    asked = {**options, "messages": MESSAGES, "max_tokens": 12}
    whole = litellm.completion(**asked)
    content = whole.choices[0].message.content
    assert content
    chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == content
    built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert built.choices[0].message.content == content
    assert built.choices[0].finish_reason == whole.choices[0].finish_reason
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(built.usage, name) == getattr(whole.usage, name)

    async def run() -> tuple[str, str]:
        answer, stream = await asyncio.gather(litellm.acompletion(**asked), litellm.acompletion(**asked, stream=True))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return answer.choices[0].message.content, "".join(pieces)

    assert asyncio.run(run()) == (content, content)


def test_text_completion(options: dict[str, Any]) -> None:
    asked = {**options, "prompt": "The capital of France is", "max_tokens": 6}
    whole = litellm.text_completion(**asked).choices[0].text
    assert "Paris" in whole
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(**asked, stream=True)) == whole


def test_structured_output(options: dict[str, Any], pet: Any) -> None:
    messages = [{"role": "user", "content": "Name a pet, as JSON."}]
    answer = litellm.completion(**options, messages=messages, response_format=pet, max_tokens=200)
    pet.model_validate_json(answer.choices[0].message.content)


def test_tools(options: dict[str, Any], weather: dict[str, Any]) -> None:
    """A call, the same in a stream, and an answer to what the tool said."""
    messages = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
    asked = {**options, "messages": messages, "tools": [weather], "max_tokens": 120}
    forced = {**asked, "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**forced).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    built = litellm.stream_chunk_builder(list(litellm.completion(**forced, stream=True)))
    (streamed,) = built.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "clear"}
    history = [*messages, whole.message.model_dump(), result]
    assert litellm.completion(**{**asked, "messages": history}, tool_choice="none").choices[0].message.content


def test_errors(options: dict[str, Any]) -> None:
    def fails(error: type[Exception], **fields: Any) -> Any:
        with pytest.raises(error) as caught:
            litellm.completion(**{**options, "messages": MESSAGES, "max_tokens": 4, **fields})
        return caught.value

    fails(litellm.ContextWindowExceededError, messages=[{"role": "user", "content": "word " * 9000}])
    fails(litellm.AuthenticationError, api_key="wrong")
    fails(litellm.NotFoundError, model=f"{options['model']}-none")
    assert "temperature" in str(fails(litellm.BadRequestError, temperature=9))
    late = {"max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    fails(litellm.Timeout, **late, timeout=0.5)
