"""The JSON bodies of answers that are not streamed, as plain dicts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill_server.processing.generation import CompletionOutput, RequestOutput
from tokenmill_server.protocol.logprobs import LogprobFormatter

Json = dict[str, Any]


@dataclass(slots=True, frozen=True)
class ReplyHead:
    """What all chunks of an answer share."""

    id: str
    created: int
    """Unix seconds."""
    model: str
    fingerprint: str | None


@dataclass(slots=True, frozen=True)
class Usage:
    """Tokens of a whole request: each prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None
    """Of the completion tokens; None if nobody looks for them."""

    def body(self) -> Json:
        body: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            body["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return body


def usage_of(outputs: Sequence[RequestOutput], reasoning_tokens: int | None = None) -> Usage:
    return Usage(
        prompt_tokens=sum([len(output.prompt_token_ids) for output in outputs]),
        completion_tokens=sum([len(choice.token_ids) for output in outputs for choice in output.outputs]),
        cached_tokens=sum([output.num_cached_tokens for output in outputs]),
        reasoning_tokens=reasoning_tokens,
    )


def chat_reply(
    head: ReplyHead,
    output: RequestOutput,
    formatter: LogprobFormatter,
    choice_body: Callable[[CompletionOutput], Json],
    *,
    return_token_ids: bool,
    reasoning_tokens: int | None = None,
) -> Json:
    """A `chat.completion`."""
    usage = usage_of([output], reasoning_tokens)
    reply = _reply(head, "chat.completion", [choice_body(choice) for choice in output.outputs], usage)
    if output.prompt_logprobs is not None:
        reply["prompt_logprobs"] = formatter.prompt(output.prompt_logprobs)
    if return_token_ids:
        reply["prompt_token_ids"] = list(output.prompt_token_ids)
    return reply


def completion_reply(head: ReplyHead, choices: list[Json], usage: Usage) -> Json:
    """A `text_completion`."""
    return _reply(head, "text_completion", choices, usage)


def _reply(head: ReplyHead, kind: str, choices: list[Json], usage: Usage) -> Json:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage.body(),
        "system_fingerprint": head.fingerprint,
    }


def chat_choice(choice: CompletionOutput, formatter: LogprobFormatter, echo: str, return_token_ids: bool) -> Json:
    """A choice of a `chat.completion` whose text is the answer. `echo` is put before it."""
    body: Json = {
        "index": choice.index,
        "message": {"role": "assistant", "content": echo + choice.text, "refusal": None},
        "logprobs": None if choice.logprobs is None else formatter.chat(choice.logprobs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if return_token_ids:
        body["token_ids"] = choice.token_ids
    return body
