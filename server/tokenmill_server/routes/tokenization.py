"""POST /tokenize and POST /detokenize"""

from fastapi import Request
from starlette.responses import Response

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.context import context_of
from tokenmill_server.protocol.chat import chat_options, parse_messages
from tokenmill_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tokenmill_server.routes.bodies import json_reply, parse, read_json


async def tokenize(request: Request) -> Response:
    """Ids of a text or of a conversation. Works before the engine is ready, and takes longer prompts than it."""
    context = context_of(request)
    inputs = context.inputs
    fields = parse(await read_json(request, context.config.max_body_bytes), TokenizeRequest)
    context.check_model(fields.model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("give either prompt or messages", "prompt")
    if fields.messages is not None:
        text = inputs.render_chat(parse_messages(fields.messages), chat_options(fields, inputs.template_variables))
        add_special_tokens = bool(fields.add_special_tokens)
    else:
        text = fields.prompt or ""
        add_special_tokens = fields.add_special_tokens is not False
    (token_ids,) = await inputs.tokenizer.encode_many([text], add_special_tokens)
    strings = [inputs.tokenizer.token_string(token_id) for token_id in token_ids] if fields.return_token_strs else None
    return json_reply(
        {
            "count": len(token_ids),
            "max_model_len": inputs.max_model_len,
            "tokens": token_ids,
            "token_strs": strings,
        }
    )


async def detokenize(request: Request) -> Response:
    """Text of token ids."""
    context = context_of(request)
    fields = parse(await read_json(request, context.config.max_body_bytes), DetokenizeRequest)
    context.check_model(fields.model)
    context.inputs.take_token_ids(fields.tokens, param="tokens")
    return json_reply({"prompt": context.inputs.tokenizer.decode(fields.tokens, skip_special_tokens=False)})
