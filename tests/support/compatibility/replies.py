"""Fields of answers, and requests whose answers have all of them."""

from typing import Any

from tests.support.compatibility.fields import FUNCTION, TOOLS
from tests.support.compatibility.rows import ReplyRow, Status

ABSENT = Status.ABSENT

_HEAD = ("id", "object", "created", "model", "choices", "system_fingerprint")
_USAGE = (
    "usage",
    *(f"usage.{name}" for name in ("prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details")),
    "usage.prompt_tokens_details.cached_tokens",
)
_CHAT_USAGE = (*_USAGE, "usage.completion_tokens_details", "usage.completion_tokens_details.reasoning_tokens")
_METRICS = (
    "metrics",
    *(
        f"metrics.{name}"
        for name in (
            *("queue_time_ms", "prefill_time_ms", "time_to_first_token_ms", "generation_time_ms", "mean_itl_ms"),
            *("tokens_per_second", "num_cached_tokens", "num_preemptions"),
        )
    ),
)
_CHOICE = tuple(f"choices[].{name}" for name in ("index", "logprobs", "finish_reason", "stop_reason", "token_ids"))
_ENTRY = ("token", "logprob", "bytes")
_CHAT_LOGPROBS = (
    "choices[].logprobs.content",
    *(f"choices[].logprobs.content[].{name}" for name in (*_ENTRY, "top_logprobs")),
    *(f"choices[].logprobs.content[].top_logprobs[].{name}" for name in _ENTRY),
)
_TEXT_LOGPROBS = tuple(
    f"choices[].logprobs.{name}" for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")
)


def _turn(name: str, *more: str) -> tuple[str, ...]:
    """Of a message or a delta."""
    fields = ("role", "content", "reasoning", "reasoning_content", "tool_calls", "function_call")
    calls = (*more, "id", "type", "function", "function.name", "function.arguments")
    return (
        f"choices[].{name}",
        *(f"choices[].{name}.{each}" for each in fields),
        *(f"choices[].{name}.tool_calls[].{each}" for each in calls),
        *(f"choices[].{name}.function_call.{each}" for each in ("name", "arguments")),
    )


_NOTES = {
    "system_fingerprint": "begins with `tokenmill-`; in every chunk",
    "usage.prompt_tokens_details.cached_tokens": "always",
    "usage.completion_tokens_details.reasoning_tokens": "with a reasoning parser",
    "metrics": "with `--enable-per-request-metrics`; times are from the arrival of the request on",
    "choices[].message.reasoning": "with a reasoning parser",
    "choices[].message.reasoning_content": "the same as `reasoning`",
    "choices[].delta.reasoning_content": "the same as `reasoning`",
    "choices[].message.function_call": "for requests with `functions`; otherwise absent, not null",
    "choices[].message.tool_calls": "absent without calls",
    "choices[].finish_reason": "`stop`, `length`, `tool_calls`, `function_call`, `repetition`",
    "prompt_text": "with `return_prompt_text`",
}


def _rows(paths: tuple[str, ...], absent: tuple[str, ...] = ()) -> tuple[ReplyRow, ...]:
    rows = [ReplyRow(path, note=_NOTES.get(path, "")) for path in paths]
    return (*rows, *(ReplyRow(path, ABSENT) for path in absent))


REPLIES = {
    "chat": _rows(
        (
            *(*_HEAD, *_CHAT_USAGE, *_METRICS, *_CHOICE, *_turn("message"), "choices[].message.refusal"),
            *(*_CHAT_LOGPROBS, "prompt_logprobs", "prompt_token_ids", "prompt_text"),
        ),
        ("choices[].message.annotations", "choices[].message.audio", "service_tier", "kv_transfer_params"),
    ),
    "chat chunk": _rows(
        (
            *(*_HEAD, *_CHAT_USAGE, *_METRICS, *_CHOICE, *_turn("delta", "index")),
            *(*_CHAT_LOGPROBS, "prompt_token_ids", "prompt_text"),
        ),
        ("service_tier",),
    ),
    "completion": _rows(
        (
            *(*_HEAD, *_USAGE, *_METRICS, *_CHOICE, "choices[].text"),
            *(*_TEXT_LOGPROBS, "choices[].prompt_logprobs", "choices[].prompt_token_ids"),
        ),
        ("service_tier", "kv_transfer_params"),
    ),
    "completion chunk": _rows(
        (*_HEAD, *_USAGE, *_METRICS, *_CHOICE, *_TEXT_LOGPROBS, "choices[].text", "choices[].prompt_token_ids"),
        ("service_tier",),
    ),
}

_LIST = ("id", "object", "created", "model", "data")
_VECTOR_USAGE = tuple(name for name in _USAGE if name != "usage.completion_tokens")
REPLIES["embedding"] = _rows(
    (*_LIST, *(f"data[].{name}" for name in ("index", "object", "embedding")), *_VECTOR_USAGE),
    ("usage.completion_tokens",),
)
REPLIES["score"] = _rows(
    (*_LIST, *(f"data[].{name}" for name in ("index", "object", "score")), *_VECTOR_USAGE), ("usage.completion_tokens",)
)
REPLIES["rerank"] = _rows(
    (
        *("id", "model", "results", "results[].document", "results[].document.text"),
        *("results[].index", "results[].relevance_score", *_VECTOR_USAGE),
    ),
    ("results[].document.multi_modal",),
)

_CALL = '<think>\nIt rains.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
_ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": _CALL}],
    "chat_template": "{{ messages[0].content }}<|im_end|>{{ tools | tojson if tools }}",
    "max_tokens": 100,
    "return_token_ids": True,
    "return_prompt_text": True,
    "logprobs": True,
    "top_logprobs": 1,
}
_USAGE_WANTED = {"stream_options": {"include_usage": True}}
SHOWN: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "chat": (
        "/v1/chat/completions",
        [{**_ASKED, **TOOLS, "prompt_logprobs": 0}, {**_ASKED, "functions": [FUNCTION]}],
    ),
    "chat chunk": (
        "/v1/chat/completions",
        [
            {**_ASKED, **TOOLS, **_USAGE_WANTED},
            {**_ASKED, "functions": [FUNCTION]},
            {**_ASKED, "messages": [{"role": "user", "content": "x"}]},
        ],
    ),
    "completion": (
        "/v1/completions",
        [{"prompt": "one two", "logprobs": 1, "prompt_logprobs": 0, "return_token_ids": True}],
    ),
    "completion chunk": (
        "/v1/completions",
        [{"prompt": "one two", "logprobs": 1, "return_token_ids": True, **_USAGE_WANTED}],
    ),
    "embedding": ("/v1/embeddings", [{"input": ["one", "two"]}]),
    "score": ("/v1/score", [{"text_1": "one", "text_2": ["two"]}]),
    "rerank": ("/v1/rerank", [{"query": "one", "documents": ["two"]}]),
}
"""The route and the requests of each kind of answer."""
