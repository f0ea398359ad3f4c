"""langchain-openai: its chat model and its model of text completions."""

import asyncio
from functools import reduce
from operator import add, or_
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def options(endpoint: Any) -> dict[str, Any]:
    named = {"base_url": endpoint.url, "api_key": endpoint.key, "model": endpoint.model}
    return {**named, "temperature": 0, "max_retries": 0}


@pytest.fixture(scope="module")
def chat(options: dict[str, Any]) -> ChatOpenAI:
    return ChatOpenAI(**options, max_tokens=120, stream_usage=True)


@tool
def get_weather(city: str, days: int) -> str:
    """Tells the weather of a city."""
    return f"clear in {city} for {days} days"


def test_invoke_and_stream(chat: ChatOpenAI, endpoint: Any) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage(QUESTION)]
    whole = chat.invoke(messages)
    assert whole.text
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.response_metadata["model_name"] == endpoint.model
    pieces = list(chat.stream(messages))
    joined = reduce(add, pieces)
    assert len(pieces) > 3
    assert joined.text == whole.text
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert joined.usage_metadata[name] == whole.usage_metadata[name] > 0


def test_chains_in_batches_and_asynchronous(chat: ChatOpenAI) -> None:
    chain = ChatPromptTemplate.from_messages([("human", "What is the capital of {country}?")]) | chat
    countries = [{"country": name} for name in ("France", "Italy", "Peru")]
    one_by_one = [chain.invoke(country).text for country in countries]
    assert [answer.text for answer in chain.batch(countries)] == one_by_one

    async def run() -> tuple[list[str], str]:
        answers = await chain.abatch(countries)
        pieces = [piece.text async for piece in chain.astream(countries[0])]
        return [answer.text for answer in answers], "".join(pieces)

    assert asyncio.run(run()) == (one_by_one, one_by_one[0])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat: ChatOpenAI, pet: Any, method: str) -> None:
    model = chat.with_structured_output(pet, method=method, include_raw=True)
    answer = model.invoke("Name a pet, as JSON.")
    assert answer["parsing_error"] is None
    assert isinstance(answer["parsed"], pet)
    assert reduce(or_, model.stream("Name a pet, as JSON."))["parsed"] == answer["parsed"]


def test_json_mode(chat: ChatOpenAI) -> None:
    """The model may not come to an end."""
    answer = chat.with_structured_output(None, method="json_mode", include_raw=True).invoke("Name a pet, as JSON.")
    assert answer["raw"].text.startswith("{")
    assert answer["raw"].response_metadata["finish_reason"] == "length" or isinstance(answer["parsed"], dict)


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_tools(chat: ChatOpenAI, choice: str) -> None:
    """A call, the same in a stream, what the tool says, and an answer to that."""
    forced = chat.bind_tools([get_weather], tool_choice=choice, parallel_tool_calls=False, strict=True)
    asked = [HumanMessage("What is the weather in Paris for two days?")]
    answer = forced.invoke(asked)
    (call,) = answer.tool_calls
    assert answer.invalid_tool_calls == []
    assert (call["name"], call["args"].keys()) == ("get_weather", {"city", "days"})
    streamed: AIMessage = reduce(add, forced.stream(asked))
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [(call["name"], call["args"])]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    free = chat.bind_tools([get_weather], tool_choice="none")
    history = [*asked, streamed, get_weather.invoke(streamed.tool_calls[0])]
    assert free.invoke(history).text == free.invoke([*asked, answer, result]).text != ""


def test_log_probabilities(chat: ChatOpenAI) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke(QUESTION)
    entries = answer.response_metadata["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2, 2, 2]


def test_text_completions(options: dict[str, Any]) -> None:
    model = OpenAI(**options, max_tokens=8)
    whole = model.invoke("The capital of France is")
    assert "Paris" in whole
    assert "".join(model.stream("The capital of France is")) == whole
    assert model.generate(["One, two,", "The capital of France is"]).generations[1][0].text == whole


def test_errors(options: dict[str, Any], chat: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        chat.invoke("word " * 9000)
    with pytest.raises(ContextOverflowError):
        list(chat.stream("word " * 9000))
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(**{**options, "api_key": "wrong"}).invoke(QUESTION)
    with pytest.raises(openai.NotFoundError):
        ChatOpenAI(**{**options, "model": "nobody"}).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ChatOpenAI(**{**options, "temperature": 9}).invoke(QUESTION)
