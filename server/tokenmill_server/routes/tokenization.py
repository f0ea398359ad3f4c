"""POST /tokenize, POST /detokenize and GET /tokenizer_info"""

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.responses import Response

from tokenmill_engine.config.gguf_file import is_gguf
from tokenmill_engine.config.hf_folder import read_optional_json
from tokenmill_engine.config.model_files import read_tokenizer_facts
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_server.context import ServerContext, context_of
from tokenmill_server.multimodal.media_request import MediaRequest
from tokenmill_server.multimodal.parts import MediaParts
from tokenmill_server.processing.chat_template import Message
from tokenmill_server.processing.input_processor import ChatOptions
from tokenmill_server.processing.sampling_checks import check_token_ids
from tokenmill_server.protocol.chat import parse_messages
from tokenmill_server.protocol.fields import ignored_fields, refuse_unsupported
from tokenmill_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tokenmill_server.protocol.tools import read_tool_use
from tokenmill_server.routes.bodies import json_reply, parse, read_json
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.output_plan import with_tools
from tokenmill_server.routes.replying import while_connected
from tokenmill_server.routes.requests import api_key_of

_MAX_CONTEXTS = 4
"""How many times the model's context a text or a list of ids may be long."""


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer's configuration, and the chat template in use."""
    context = context_of(request)
    facts = await asyncio.to_thread(_configuration, Path(context.engine_config.model.tokenizer_path))
    template = context.inputs.template
    return json_reply({**facts, "chat_template": None if template is None else template.source})


@cache
def _configuration(tokenizer: Path) -> dict[str, Any]:
    """That of its folder; of a GGUF file what the header has of it, which is long. Read when it is first asked for; a
    server has the tokenizer that it has loaded, whatever becomes of the files."""
    if is_gguf(tokenizer):
        _, bos_token, eos_token = read_tokenizer_facts(tokenizer)
        return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos_token, "eos_token": eos_token}
    return read_optional_json(tokenizer / "tokenizer_config.json")


async def tokenize(request: Request) -> Response:
    """Ids of a text or of a conversation. Works before the engine is ready, and takes longer prompts than it."""
    context = context_of(request)
    inputs = context.inputs
    body = await read_json(request, context.config.max_body_bytes)
    refuse_unsupported(body, TokenizeRequest.model_fields)
    fields = parse(body, TokenizeRequest)
    headers: dict[str, str] = {}
    note_ignored(context, headers, ignored_fields(body, TokenizeRequest.model_fields))
    context.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if fields.messages is None:
        token_ids = await _encode_text(context, fields.prompt or "", fields.add_special_tokens is not False)
    else:
        parts = context.media_parts()
        messages, options = parse_messages(fields.messages, parts), _chat_options(context, fields)
        note_ignored(context, headers, [*parts.ignored, *options.unread])
        token_ids = await _encode_chat(request, fields, options, messages, parts)
    strings = await asyncio.to_thread(inputs.tokenizer.token_strings, token_ids) if fields.return_token_strs else None
    return json_reply(
        {
            "count": len(token_ids),
            "max_model_len": inputs.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        },
        headers,
    )


def _chat_options(context: ServerContext, fields: TokenizeRequest) -> ChatOptions:
    tools = read_tool_use(fields.tools, fields.tool_choice, None)
    return with_tools(context, context.chat_options(fields), tools)


async def _encode_chat(
    request: Request, fields: TokenizeRequest, options: ChatOptions, messages: list[Message], parts: MediaParts
) -> list[int]:
    """Images and videos are fetched, since their sizes count; then the prompt must fit, as in the chat route."""
    context = context_of(request)
    media = context.media
    wishes = context.media_wishes(fields.media_io_kwargs, fields.mm_processor_kwargs)
    if media is None or not parts.sources:
        text = await context.inputs.chat_text(messages, options)
        return await _encode_text(context, text, options.add_special_tokens)
    asked = MediaRequest(parts.sources, wishes, (api_key_of(request), ""))
    prompt = await while_connected(request, media.encode(messages, asked, options))
    return list(prompt.token_ids)


async def _encode_text(context: ServerContext, text: str, add_special_tokens: bool) -> list[int]:
    inputs = context.inputs
    inputs.check_text_length(len(text), _MAX_CONTEXTS * inputs.max_model_len, "prompt")
    (token_ids,) = await inputs.tokenizer.encode_many([text], add_special_tokens)
    return token_ids


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    context = context_of(request)
    body = await read_json(request, context.config.max_body_bytes)
    fields = parse(body, DetokenizeRequest)
    headers: dict[str, str] = {}
    note_ignored(context, headers, ignored_fields(body, DetokenizeRequest.model_fields))
    context.check_model(fields.model)
    inputs = context.inputs
    most = _MAX_CONTEXTS * inputs.max_model_len
    if len(fields.tokens) > most:
        raise ContextLengthError(f"tokens has {len(fields.tokens)} ids, more than the limit of {most}", "tokens")
    check_token_ids(fields.tokens, inputs.vocab_size, "tokens")
    text = await asyncio.to_thread(inputs.tokenizer.decode, fields.tokens, skip_special_tokens=False)
    return json_reply({"prompt": text}, headers)
