"""What `LLM` takes: prompts, conversations and sampling parameters as people write them, checked for their types.

A wrong type is a TypeError with a sentence. Ranges are checked where those of HTTP requests are.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import msgspec

from tokenmill_engine.errors import InvalidRequestError, RequestError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.multimodal.given import given_media
from tokenmill_server.multimodal.parts import MediaParts, MediaSource
from tokenmill_server.multimodal.wishes import MediaWishes
from tokenmill_server.processing.chat_template import Message
from tokenmill_server.processing.input_processor import ChatOptions
from tokenmill_server.processing.shown import shown
from tokenmill_server.processing.tool_history import check_history
from tokenmill_server.protocol.tools import read_tool_use

logger = logging.getLogger(__name__)

PromptInput = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, the latter two with optional `cache_salt`,
`multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs`."""

_PROMPT_KINDS = 'text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'
_PROMPT_FIELDS = ("prompt", "prompt_token_ids")
_BESIDE_PROMPTS = ("cache_salt", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_LIST_FIELDS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")

_PYTHON_WORDS = {"array": "list", "object": "dict", "null": "None"}
_JSON_WORD = re.compile(r"\b(array|object|null)\b")


@dataclass(slots=True, frozen=True)
class Conversation:
    """Messages with text contents; those with media have lists of parts."""

    messages: list[Message]
    sources: list[MediaSource]


@dataclass(slots=True, frozen=True)
class Item:
    """One prompt as the user gave it: text, else a conversation with media, else token ids."""

    text: str | None = None
    token_ids: Sequence[int] = ()
    add_special_tokens: bool = True
    cache_salt: str | None = None
    conversation: Conversation | None = None
    sources: Sequence[MediaSource] = ()
    """Media of text or token ids."""
    processor_kwargs: Mapping[str, Any] | None = None
    """How these are to be prepared, as the user wrote it."""
    wishes: MediaWishes | None = None
    """How the media of a conversation are read and prepared."""
    chat_options: ChatOptions = ChatOptions()  # noqa: RUF009 - frozen


def items_of(prompts: PromptInput | Sequence[PromptInput], parts: Callable[[], MediaParts]) -> list[Item]:
    """The prompts of one call. A list of token ids is one prompt, a list of anything else is a list of prompts. `parts`
    knows which media the model takes.

    Raises:
        TypeError: something else was given.
        InvalidRequestError: a mapping has wrong keys, or media that the model does not take.
    """
    if isinstance(prompts, str | Mapping):
        return [_item(prompts, "the prompt", parts)]
    if not _is_list(prompts):
        raise TypeError(f"a prompt is {_PROMPT_KINDS}, and prompts are a list of these; got {_type_name(prompts)}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [_item(prompts, "the prompt", parts)]
    return [_item(prompt, f"prompt {index}", parts) for index, prompt in enumerate(prompts)]


def priorities_of(given: Sequence[int] | None, count: int) -> list[int]:
    """The priority of each of `count` prompts; None is 0 for all.

    Raises:
        TypeError: something else was given.
        InvalidRequestError: there are not as many as prompts.
    """
    if given is None:
        return [0] * count
    if not _is_list(given):
        raise TypeError(f"priority must be a list of integers, one per prompt; got {_type_name(given)}")
    if len(given) != count:
        raise InvalidRequestError(f"{count} prompts need as many priorities, got {len(given)}")
    return list(given)


def _item(prompt: object, label: str, parts: Callable[[], MediaParts]) -> Item:
    if isinstance(prompt, str):
        return Item(text=prompt)
    if isinstance(prompt, Mapping):
        return _mapping_item(prompt, label, parts)
    if not _is_list(prompt):
        raise TypeError(f"{label} must be {_PROMPT_KINDS}; got {_type_name(prompt)}")
    return Item(token_ids=list(prompt))


def _mapping_item(prompt: Mapping[str, Any], label: str, parts: Callable[[], MediaParts]) -> Item:
    unknown = [key for key in prompt if key not in (*_PROMPT_FIELDS, *_BESIDE_PROMPTS)]
    if unknown or sum(field in prompt for field in _PROMPT_FIELDS) != 1:
        wrong = f"{shown(unknown[0])}, which is not known" if unknown else "both of these, or neither"
        raise InvalidRequestError(
            "a prompt mapping has either `prompt` or `prompt_token_ids`, and perhaps "
            f"{', '.join(f'`{name}`' for name in _BESIDE_PROMPTS)}; {label} has {wrong}"
        )
    salt, kwargs = prompt.get("cache_salt"), prompt.get("mm_processor_kwargs")
    if salt is not None and not isinstance(salt, str):
        raise TypeError(f"cache_salt of {label} must be text; got {_type_name(salt)}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"mm_processor_kwargs of {label} must be a dict; got {_type_name(kwargs)}")
    sources = tuple(given_media(prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"), parts(), label))
    if "prompt" in prompt:
        if not isinstance(prompt["prompt"], str):
            raise TypeError(f"`prompt` of {label} must be text; got {_type_name(prompt['prompt'])}")
        return Item(text=prompt["prompt"], cache_salt=salt, sources=sources, processor_kwargs=kwargs)
    if not _is_list(prompt["prompt_token_ids"]):
        raise TypeError(
            f"`prompt_token_ids` of {label} must be a list of integers; got {_type_name(prompt['prompt_token_ids'])}"
        )
    ids = list(prompt["prompt_token_ids"])
    return Item(token_ids=ids, cache_salt=salt, sources=sources, processor_kwargs=kwargs)


def conversations_of(
    messages: Sequence[Message] | Sequence[Sequence[Message]], parts: Callable[[], MediaParts]
) -> list[Conversation]:
    """The conversations of one call. `parts` is asked once for each.

    Raises:
        TypeError: something else was given.
        InvalidRequestError: a message has no role, or content that the model does not take.
    """
    if not _is_list(messages):
        raise TypeError(
            f'messages must be a list such as [{{"role": "user", "content": "Hello"}}], or a list of these; '
            f"got {_type_name(messages)}"
        )
    several = [messages] if messages and isinstance(messages[0], Mapping) else messages
    conversations = []
    for index, conversation in enumerate(several):
        with naming_prompt(index):
            conversations.append(_conversation(conversation, parts()))
    return conversations


@contextmanager
def naming_prompt(index: int) -> Iterator[None]:
    """What is wrong with a request, in words that say with which, and with what part of it."""
    try:
        yield
    except RequestError as error:
        place = f" (at {error.param})" if "[" in (error.param or "") else ""
        raise type(error)(f"prompt {index}: {error}{place}", error.param, error.code) from error


def _conversation(conversation: object, parts: MediaParts) -> Conversation:
    if not _is_list(conversation):
        raise TypeError(f"a conversation must be a list of messages; got {_type_name(conversation)}")
    checked: list[Message] = []
    for index, message in enumerate(conversation):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError("every message is a mapping with a `role`", f"messages[{index}]")
        message = check_history(dict(message), f"messages[{index}]")
        content = parts.content(message.get("content"), f"messages[{index}].content")
        checked.append({**message, "content": content})
    if not checked:
        raise InvalidRequestError("a conversation needs at least one message", "messages")
    if parts.ignored:
        logger.warning("keys of content parts without effect: %s", ", ".join(parts.ignored))
    return Conversation(checked, parts.sources)


def template_variables_of(
    given: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None, known: Set[str]
) -> dict[str, Any]:
    """What a chat template sees beside the messages. `known`: names that the model's template reads.

    Raises:
        TypeError: something else was given.
        InvalidRequestError: a tool is malformed, or the template has no tools.
    """
    variables = dict(given or {})
    if tools is None:
        return variables
    if not _is_list(tools) or not all(isinstance(tool, Mapping) for tool in tools):
        raise TypeError(f"tools must be a list of dicts; got {_type_name(tools)}")
    if read_tool_use([dict(tool) for tool in tools], None, None) is not None and "tools" not in known:
        raise InvalidRequestError("this model's chat template has no tools", "tools", "unsupported_parameter")
    return {**variables, "tools": list(tools)}


def sampling_of(given: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """The parameters of each of `count` prompts.

    Raises:
        TypeError: something else was given, or a field holds another type.
        InvalidRequestError: there are not as many as prompts.
    """
    if isinstance(given, SamplingParams):
        return [_typed(given)] * count
    if not _is_list(given) or not all(isinstance(params, SamplingParams) for params in given):
        wrong = next((p for p in given if not isinstance(p, SamplingParams)), given) if _is_list(given) else given
        raise TypeError(
            "sampling_params must be SamplingParams(...), or a list of them with one per prompt; "
            f"got {_type_name(wrong)}"
        )
    if len(given) != count:
        raise InvalidRequestError(f"{count} prompts need one or as many sampling_params, got {len(given)}")
    return [_typed(params) for params in given]


def _typed(sampling: SamplingParams) -> SamplingParams:
    """With lists and single strings, which people write, as the tuples that travel.

    Raises:
        TypeError: a field holds what the engine could not read.
    """
    fields = msgspec.structs.asdict(sampling)
    for name in _LIST_FIELDS:
        if isinstance(fields[name], str):
            fields[name] = (fields[name],)
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        field = place.rpartition("$.")[2].rstrip("`")
        words = _JSON_WORD.sub(lambda word: _PYTHON_WORDS[word[0]], reason.replace("`", ""))
        raise TypeError(f"SamplingParams(...): {field} is of a wrong type: {words}") from None


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _type_name(value: object) -> str:
    return type(value).__name__
