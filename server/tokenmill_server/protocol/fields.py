"""Request fields that chat and completions share, and what becomes of fields we do not have.

Models check types only; ranges are checked where `LLM` needs them too (`processing.sampling_checks`).
"""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import RepetitionDetection, SamplingParams
from tokenmill_server.processing.input_processor import Truncation
from tokenmill_server.processing.shown import shown
from tokenmill_server.protocol.structured import structured_params

Json = dict[str, Any]
T = TypeVar("T")

MAX_STOP_STRINGS = 4
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_MAX_BIAS = 100.0
_MAX_CACHE_SALT_CHARS = 128
_MAX_REQUEST_ID_CHARS = 256


def _whole_float_to_int(value: Any) -> Any:
    """Some clients know only one kind of number and send 16.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _first_wrong_number(value: Any) -> Any:
    """A dict with a million wrong values is one error, not a million."""
    for number in value.values() if isinstance(value, dict) else ():
        if type(number) is not float and type(number) is not int:
            raise PydanticCustomError(
                "float_type", "Values should be numbers, one is {value}", {"value": shown(number)}
            )
    return value


Int = Annotated[int, BeforeValidator(_whole_float_to_int)]
List = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong entry is the only one that is reported."""


class StreamOptions(BaseModel):
    """`include_usage`: one more chunk with the usage of all choices; `continuous_usage_stats`: in every chunk."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class RepetitionFields(BaseModel):
    """As in `messages.RepetitionDetection`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    max_pattern_size: Int = 0
    min_pattern_size: Int = 0
    min_count: Int = 0

    def detection(self) -> RepetitionDetection | None:
        """What to look for, if anything."""
        if self.max_pattern_size == 0:
            return None
        return RepetitionDetection(
            max_pattern_size=self.max_pattern_size,
            min_pattern_size=self.min_pattern_size or 1,
            min_count=self.min_count or 2,
        )


class CommonFields(BaseModel):
    """What all requests for a model's work have in common. None means: not given."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    priority: Int | None = None
    request_id: str | None = None

    def check_common(self) -> None:
        """Raises InvalidRequestError for contradictions that need no model to see."""
        if self.request_id is not None and not is_request_id(self.request_id):
            raise InvalidRequestError(
                f"request_id must have 1 to {_MAX_REQUEST_ID_CHARS} printable ASCII characters", "request_id"
            )


class GenerationFields(CommonFields):
    """What chat and completions have in common."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | List[str] | None = None
    stop_token_ids: List[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_first_wrong_number)] = None
    allowed_token_ids: List[Int] | None = None
    bad_words: List[str] | None = None
    logprob_token_ids: List[Int] | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: Int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = None
    repetition_detection: RepetitionFields | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None

    def check_common(self) -> None:
        """As in `CommonFields`."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise InvalidRequestError("continuous_usage_stats needs include_usage", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", "prompt_logprobs")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise InvalidRequestError("stream_interval must be at least 1", "stream_interval")
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings are allowed", "stop")
        if self.cache_salt is not None and not _is_salt(self.cache_salt):
            raise InvalidRequestError(
                f"cache_salt must have 1 to {_MAX_CACHE_SALT_CHARS} characters, none of them @ / \\ or NUL",
                "cache_salt",
            )
        super().check_common()

    def truncation(self) -> Truncation | None:
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "left")

    def sampling_params(
        self,
        defaults: Mapping[str, Any],
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """How to sample: what the request says, else the server's `defaults`, else the API's."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        settings: Json = {name: value for name, value in defaults.items() if name in _DEFAULTABLE}
        settings |= {
            name: value for name in self.model_fields_set & _COPIED if (value := getattr(self, name)) is not None
        }
        if self.seed == -1:
            settings["seed"] = None
        return SamplingParams(
            **settings,
            max_tokens=max_tokens,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_parse_bias(self.logit_bias),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            bad_words=tuple(self.bad_words or ()),
            logprobs=logprobs,
            logprob_token_ids=tuple(dict.fromkeys(self.logprob_token_ids or ())),
            prompt_logprobs=prompt_logprobs,
            repetition_detection=None if self.repetition_detection is None else self.repetition_detection.detection(),
            structured_outputs=structured_params(self.response_format, self.structured_outputs),
        )


_DEFAULTABLE = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})
_COPIED = _DEFAULTABLE | {
    *("n", "seed", "presence_penalty", "frequency_penalty", "min_tokens", "include_stop_str_in_output", "ignore_eos"),
    *("skip_special_tokens", "spaces_between_special_tokens"),
}


def is_request_id(text: str) -> bool:
    """Whether `text` may be an id: it goes into response headers and logs."""
    return 0 < len(text) <= _MAX_REQUEST_ID_CHARS and text.isascii() and text.isprintable()


def _is_salt(salt: str) -> bool:
    return 0 < len(salt) <= _MAX_CACHE_SALT_CHARS and not set(salt) & set("@/\\\0")


def _parse_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    """Token ids from the JSON object's keys. Values are limited to +-100, which OpenAI declares as the range."""
    if not bias:
        return None
    for key in bias:
        if _TOKEN_ID.fullmatch(key) is None:
            raise InvalidRequestError(f"logit_bias keys are token ids, got {shown(key)}", "logit_bias")
    return {int(key): max(-_MAX_BIAS, min(_MAX_BIAS, value)) for key, value in bias.items()}


# --- fields we do not have ----------------------------------------------------------------------------------------


def _is_default(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or value in values


UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tools", "functions"), _is_default([])),
    **dict.fromkeys(("tool_choice", "function_call"), _is_default("none")),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), _is_default()),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), _is_default()),
    "modalities": _is_default(["text"]),
    "audio": _is_default(),
    "prompt_embeds": _is_default(),
    "media_io_kwargs": _is_default({}),
    "mm_processor_kwargs": _is_default({}),
    "multi_modal_data": _is_default({}),
    "thinking_token_budget": _is_default(-1),
    "include_reasoning": _is_default(True),
    "chat_template": _is_default(),
    "kv_transfer_params": _is_default(),
    "ec_transfer_params": _is_default(),
    "vllm_xargs": _is_default({}),
    "return_prompt_text": _is_default(False),
    "suffix": _is_default(""),
}
"""Fields that would change the output but that this server does not implement, with the values that ask nothing."""

INSTEAD = {
    "guided_json": 'use structured_outputs: {"json": ...}, or response_format',
    "guided_regex": 'use structured_outputs: {"regex": ...}',
    "guided_choice": 'use structured_outputs: {"choice": [...]}',
    "guided_grammar": 'use structured_outputs: {"grammar": ...}',
    "guided_decoding_backend": "the server's --structured-outputs-config.backend chooses",
    "guided_whitespace_pattern": 'use structured_outputs: {"json": ..., "whitespace_pattern": ...}',
    "best_of": "it may only equal n; ask for n choices with logprobs, and take the best",
}
"""What to do in the place of such a field; the end of a sentence."""


def refuse_unsupported(body: Json, known: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for a field that would be without effect although the client relies on it. `known` are
    fields of the request, which some kinds of requests have."""
    strangers = body.keys() - known.keys()
    if not strangers:
        return
    for name in UNSUPPORTED.keys() & strangers:
        if not UNSUPPORTED[name](body[name]) and not _is_moot(name, body):
            raise _unsupported(name)
    best_of = body.get("best_of")
    if best_of is not None and best_of != (body.get("n") or 1):
        raise _unsupported("best_of")


def _unsupported(name: str) -> InvalidRequestError:
    advice = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    return InvalidRequestError(f"{name} is not supported by this server{advice}", name, "unsupported_parameter")


def _is_moot(name: str, body: Json) -> bool:
    """Whether another field says that this one is to have no effect: tools that must not be called, and the choice
    among none."""
    for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
        if name == tools:
            return isinstance(body[tools], list) and body.get(choice) == "none"
        if name == choice:
            return bool(body[choice] == "auto" and body.get(tools) == [])
    return False


def ignored_fields(body: Json, known: Mapping[str, Any]) -> list[str]:
    """Names in `body` that have no effect although they ask for something: the reply says so in a header."""
    ignored = [
        name
        for name in body.keys() - known.keys() - {"best_of"}
        if (body[name] is not None if name not in UNSUPPORTED else not UNSUPPORTED[name](body[name]))
    ]
    options = body.get("stream_options")
    if isinstance(options, dict):
        strangers = options.keys() - StreamOptions.model_fields.keys()
        ignored += [f"stream_options.{name}" for name in strangers if options[name] is not None]
    return sorted(ignored)
