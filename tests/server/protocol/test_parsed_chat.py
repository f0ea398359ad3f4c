"""A streamed answer is the whole one, whatever the steps of the engine and the intervals of the stream."""

import asyncio
import json
import struct
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.tool_outputs import BY_PARSER, TOOLS
from tokenmill_engine.messages import Finish, FinishReason, SamplingParams, TokenLogprobs
from tokenmill_server.parsing.plan import OutputPlan, ToolPlan
from tokenmill_server.parsing.reasoning import Start
from tokenmill_server.processing.collector import Collector
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.output_processor import Generation, OutputListener
from tokenmill_server.processing.sse import EventBuffer
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.protocol.chunks import ChatShape, StreamOptionsInEffect, StreamSession
from tokenmill_server.protocol.logprobs import LogprobFormatter
from tokenmill_server.protocol.parsed_chat import ParsedChat, ParsedChoiceStream
from tokenmill_server.protocol.replies import ReplyHead

Json = dict[str, Any]

THOUGHTS = ["", "<think>\nHm </thin\n</think>\n\n", "<think></think>", "Hm.\n</think>\n", "<think>never ends"]


def run(
    tokenizer: Tokenizer, listener: OutputListener, token_ids: Sequence[int], sizes: Sequence[int], logprobs: bool
) -> Generation:
    """A generation of these tokens, in steps of these sizes, cut short at its end."""
    sampling = SamplingParams(logprobs=0 if logprobs else None)
    generation = Generation(GenerationRequest("label", [504], sampling, 0.0), listener, tokenizer, 0)
    position = 0
    for size in [*sizes, *[1] * len(token_ids)]:
        step = list(token_ids[position : position + size])
        if not step:
            break
        position += size
        finish = Finish(0, FinishReason.LENGTH) if position >= len(token_ids) else None
        generation.choices[0].push(step, finish, logprobs_of(step) if logprobs else None)
    return generation


def logprobs_of(tokens: Sequence[int]) -> TokenLogprobs:
    count = len(tokens)
    packed = struct.pack(f"<{count}i", *tokens), struct.pack(f"<{count}f", *[-1.0] * count)
    return TokenLogprobs(0, 0, *packed, struct.pack(f"<{count}i", *[1] * count))


def joined(events: bytes, reasoning: bool) -> Json:
    """The message, tokens and log-probabilities of a stream, as the whole answer has them, and the usage."""
    chunks = [json.loads(event.removeprefix("data: ")) for event in events.decode().split("\n\n")[:-2]]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls: list[Json] = []
    for part in (part for delta in deltas for part in delta.get("tool_calls", [])):
        if "id" in part:
            calls.append({"name": part["function"]["name"], "arguments": ""})
        calls[part["index"]]["arguments"] += part["function"]["arguments"]
    thinking = "".join(delta.get("reasoning", "") for delta in deltas)
    assert thinking == "".join(delta.get("reasoning_content", "") for delta in deltas)
    assert reasoning or not thinking
    return {
        "content": "".join(delta.get("content", "") for delta in deltas),
        "reasoning": thinking,
        "calls": calls,
        "token_ids": [token for choice in choices for token in choice.get("token_ids", [])],
        "logprobs": [each for choice in choices for each in (choice.get("logprobs") or {}).get("content", [])],
        "finish_reason": choices[-1]["finish_reason"],
        "usage": chunks[-1]["usage"]["completion_tokens_details"],
    }


@given(data=st.data())
def test_a_stream_is_the_whole_answer(tokenizer: Tokenizer, data: st.DataObject) -> None:
    parser = data.draw(st.sampled_from(sorted(BY_PARSER)))
    text = data.draw(st.sampled_from(THOUGHTS)) + data.draw(st.sampled_from(BY_PARSER[parser])).text
    token_ids = tokenizer.encode(text)
    token_ids = token_ids[: data.draw(st.integers(1, len(token_ids)))]
    sizes = data.draw(st.lists(st.integers(1, 9), max_size=8))
    logprobs, reasoning, with_ids = (data.draw(st.booleans()) for _ in range(3))
    interval = data.draw(st.sampled_from([1, 1, 2, 7]))
    plan = OutputPlan(ToolPlan(TOOLS, parser), data.draw(st.sampled_from(Start)), reasoning)
    formatter = LogprobFormatter(tokenizer, False)
    parsed = ParsedChat(plan, formatter, tokenizer.token_bytes)

    async def both() -> tuple[Json, Json]:
        collector = Collector()
        generation = run(tokenizer, collector, token_ids, [], logprobs)
        output = collector.result(generation)
        choice = parsed.choice(output.outputs[0], "", True)
        message = choice["message"]
        whole = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning") or "",
            "calls": [call["function"] for call in message.get("tool_calls", [])],
            "token_ids": choice["token_ids"] if with_ids else [],
            "logprobs": choice["logprobs"]["content"] if logprobs else [],
            "finish_reason": choice["finish_reason"],
            "usage": {"reasoning_tokens": parsed.reasoning_tokens(output.outputs)},
        }
        options = StreamOptionsInEffect(interval, include_usage=True, return_token_ids=with_ids)
        session = StreamSession(EventBuffer(), ReplyHead("id", 0, "model", "print"), "chat.completion.chunk", options)
        stream = ParsedChoiceStream(session, ChatShape(formatter), parsed, 1)
        session.generations.append(run(tokenizer, stream, token_ids, sizes, logprobs))
        return whole, joined(await session.buffer.read(), reasoning)

    whole, streamed = asyncio.run(both())
    assert streamed == whole
