"""The bodies of POST /tokenize and POST /detokenize."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from tokenmill_server.protocol.fields import Int, List


class TokenizeRequest(BaseModel):
    """A text, or a conversation as the chat route would render it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: List[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: List[dict[str, Any]] | None = None
    tools: List[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    media_io_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(BaseModel):
    """Token ids."""

    model_config = ConfigDict(extra="ignore", strict=True)

    model: str | None = None
    tokens: List[Int]
