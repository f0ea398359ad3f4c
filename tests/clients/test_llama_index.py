"""llama-index's model for servers like OpenAI's, for chats and for text completions."""

import asyncio
from typing import Any

import openai
import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

QUESTION = "What is the capital of France?"
MESSAGES = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content=QUESTION)]


@pytest.fixture(scope="module")
def options(endpoint: Any) -> dict[str, Any]:
    named = {"api_base": endpoint.url, "api_key": endpoint.key, "model": endpoint.model}
    return {**named, "temperature": 0.0, "max_tokens": 12, "max_retries": 0, "context_window": 8192}


@pytest.fixture(scope="module", params=[True, False], ids=["chat", "text"])
def model(request: pytest.FixtureRequest, options: dict[str, Any]) -> OpenAILike:
    return OpenAILike(**options, is_chat_model=request.param)


@pytest.fixture(scope="module")
def caller(options: dict[str, Any]) -> OpenAILike:
    capable = {"is_chat_model": True, "is_function_calling_model": True, "should_use_structured_outputs": True}
    return OpenAILike(**{**options, "max_tokens": 200}, **capable)


def test_complete(model: OpenAILike) -> None:
    whole = model.complete("The capital of France is").text
    assert "Paris" in whole
    pieces = list(model.stream_complete("The capital of France is"))
    assert pieces[-1].text == "".join(piece.delta or "" for piece in pieces) == whole


def test_chat(model: OpenAILike) -> None:
    """Whole and streamed, with and without asyncio."""
    whole = model.chat(MESSAGES).message.content
    assert whole
    pieces = list(model.stream_chat(MESSAGES))
    assert pieces[-1].message.content == "".join(piece.delta or "" for piece in pieces) == whole

    async def run() -> tuple[str, str]:
        answer = await model.achat(MESSAGES)
        deltas = [piece.delta or "" async for piece in await model.astream_chat(MESSAGES)]
        return answer.message.content, "".join(deltas)

    assert asyncio.run(run()) == (whole, whole)


def test_structured_output(caller: OpenAILike, pet: Any) -> None:
    prompt = PromptTemplate("Name a {what}, as JSON.")
    found = caller.structured_predict(pet, prompt, what="pet")
    assert isinstance(found, pet)
    assert caller.as_structured_llm(pet).complete("Name a pet, as JSON.").raw == found


def test_tools(caller: OpenAILike) -> None:
    """A call, the same in a stream, and a function that the client calls itself."""
    given: list[tuple[str, int]] = []

    def get_weather(city: str, days: int) -> str:
        """Tells the weather of a city."""
        given.append((city, days))
        return "clear"

    tools, asked = [FunctionTool.from_defaults(get_weather)], "What is the weather in Paris for two days?"
    forced: dict[str, Any] = {"user_msg": asked, "tool_required": True, "allow_parallel_tool_calls": False}
    whole = caller.chat_with_tools(tools, **forced)
    (call,) = caller.get_tool_calls_from_response(whole)
    assert (call.tool_name, call.tool_kwargs.keys()) == ("get_weather", {"city", "days"})
    *_, last = caller.stream_chat_with_tools(tools, **forced)
    assert caller.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
    answer = caller.predict_and_call(tools, user_msg=asked, tool_required=True, allow_parallel_tool_calls=False)
    assert answer.response == "clear"
    assert given == [(call.tool_kwargs["city"], call.tool_kwargs["days"])]
    result = ChatMessage(role="tool", content="clear", additional_kwargs={"tool_call_id": call.tool_id})
    history = [ChatMessage(role="user", content=asked), whole.message, result]
    assert caller.chat(history).message.content


def test_errors(options: dict[str, Any]) -> None:
    for changes, error in (
        ({"api_key": "wrong"}, openai.AuthenticationError),
        ({"model": "nobody"}, openai.NotFoundError),
        ({"additional_kwargs": {"top_p": 9}}, openai.BadRequestError),
    ):
        with pytest.raises(error):
            OpenAILike(**{**options, **changes}, is_chat_model=True).chat(MESSAGES)
