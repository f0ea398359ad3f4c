"""The body of POST /v1/chat/completions."""

from collections.abc import Mapping, Set
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.parts import MediaParts
from tokenmill_server.processing.chat_template import RESERVED_NAMES, ChatTemplate, Message
from tokenmill_server.processing.input_processor import ChatOptions
from tokenmill_server.processing.shown import shown
from tokenmill_server.processing.tool_history import check_history
from tokenmill_server.protocol.fields import GenerationFields, Int, List
from tokenmill_server.protocol.functions import read_function_use, with_tool_calls
from tokenmill_server.protocol.tokenize import TokenizeRequest
from tokenmill_server.protocol.tools import ToolUse, read_tool_use

_ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_PARTS = 10_000
"""Of all messages of a request together: as many take some 40 ms, during which other requests wait."""


class ChatRequest(GenerationFields):
    """Fields of a chat completion beside the common ones."""

    messages: List[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: List[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None
    tools: List[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """Without tools there are no calls to be parallel."""
    functions: List[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int | None = None

    def max_reasoning_tokens(self) -> int | None:
        """How many tokens a model may think; None for any number."""
        if self.thinking_token_budget is not None and not -1 <= self.thinking_token_budget < 2**31:
            raise InvalidRequestError("thinking_token_budget must be -1 or a number of tokens", "thinking_token_budget")
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def tool_use(self) -> ToolUse | None:
        """What may be called; None: nothing. Raises InvalidRequestError naming what is malformed."""
        if self.functions is None and self.function_call is None:
            return read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        for name in ("tools", "tool_choice"):
            if getattr(self, name) is not None:
                raise InvalidRequestError(f"functions and {name} exclude each other; use tools alone", name)
        return read_function_use(self.functions, self.function_call)

    def num_top_logprobs(self) -> int | None:
        """How many alternatives to report per token; None for no log-probabilities at all."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def token_limit(self, most: int) -> int | None:
        """None: what fits. Raises InvalidRequestError if `max_completion_tokens` is not between 1 and `most`, the
        model's context length."""
        limit = self.max_completion_tokens
        if limit is not None and not 1 <= limit <= most:
            raise InvalidRequestError(
                f"max_completion_tokens must be at least 1 and at most {most}, the model's maximum context length",
                "max_completion_tokens",
            )
        return self.max_tokens if limit is None else limit


def chat_options(
    request: ChatRequest | TokenizeRequest,
    template_variables: Set[str],
    template: ChatTemplate | None,
    defaults: Mapping[str, Any],
) -> ChatOptions:
    """How to render. `template_variables` are the names that the template reads: `template`, or the model's own.
    `defaults` are the server's values for some.

    Raises InvalidRequestError for a reasoning effort that the template does not know: it would be without effect.
    """
    variables = dict(request.chat_template_kwargs or {})
    reserved = {"messages", "add_generation_prompt", "tools"} & variables.keys()
    if reserved:
        raise InvalidRequestError(f"{min(reserved)} has a field of its own", "chat_template_kwargs")
    if names := RESERVED_NAMES & variables.keys():
        raise InvalidRequestError(f"{min(names)} is a name that templates need themselves", "chat_template_kwargs")
    if request.documents is not None:
        variables["documents"] = request.documents
    if request.reasoning_effort is not None:
        if not template_variables & {"reasoning_effort", "enable_thinking"}:
            raise InvalidRequestError("this model's chat template has no reasoning effort", "reasoning_effort")
        variables["reasoning_effort"] = request.reasoning_effort
        variables["enable_thinking"] = request.reasoning_effort != "none"
    continues = bool(request.continue_final_message)
    return ChatOptions(
        add_generation_prompt=not continues if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=continues,
        add_special_tokens=bool(request.add_special_tokens),
        template_variables={**defaults, **variables},
        template=template,
        unread=_unread(request, template_variables),
    )


def _unread(request: ChatRequest | TokenizeRequest, template_variables: Set[str]) -> list[str]:
    """Fields for the template that it does not look at."""
    given = request.chat_template_kwargs or {}
    unread = [f"chat_template_kwargs.{name}" for name in given if name not in template_variables]
    return unread if not request.documents or "documents" in template_variables else [*unread, "documents"]


def parse_messages(messages: list[dict[str, Any]], parts: MediaParts) -> list[Message]:
    """Messages with plain text content, as templates expect them. `parts` takes the media out; contents that have some
    are lists of parts.

    Raises InvalidRequestError naming the message that is malformed or asks for what is not supported.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty", "messages")
    _check_num_parts(messages)
    return [_parse_message(message, f"messages[{index}]", parts) for index, message in enumerate(messages)]


def _check_num_parts(messages: list[dict[str, Any]]) -> None:
    num_parts = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        num_parts += max(1, len(content)) if isinstance(content, list) else 1
        if num_parts > MAX_PARTS:
            raise InvalidRequestError(
                f"the messages have more than {MAX_PARTS} content parts together, which is the limit; a message of "
                "text counts as one",
                f"messages[{index}].content" if isinstance(content, list) else f"messages[{index}]",
            )


def _parse_message(message: dict[str, Any], path: str, parts: MediaParts) -> Message:
    message = with_tool_calls(message, path)
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(f"role must be one of {', '.join(_ROLES)}, got {shown(role)}", f"{path}.role")
    message = check_history(message, path)
    content = parts.content(message.get("content"), f"{path}.content")
    if content is None and not (message.get("tool_calls") or message.get("reasoning")):
        raise InvalidRequestError("content is missing", f"{path}.content")
    extra = {name: value for name, value in message.items() if value is not None}
    return {**extra, "role": role, "content": content}
