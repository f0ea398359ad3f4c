"""POST /v1/chat/completions"""

from typing import Any

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.deadlines import in_time
from tokenmill_server.multimodal.media_request import MediaRequest
from tokenmill_server.processing.chat_template import text_of_message
from tokenmill_server.processing.input_processor import InputProcessor, Prompt
from tokenmill_server.processing.sampling_checks import check_num_prompt_logprobs
from tokenmill_server.protocol.chat import ChatRequest, parse_messages
from tokenmill_server.protocol.chunks import ChatShape, ChoiceStream
from tokenmill_server.protocol.logprobs import LogprobFormatter, num_logprobs
from tokenmill_server.protocol.replies import chat_reply
from tokenmill_server.routes.bodies import large_json_reply
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.replying import while_connected
from tokenmill_server.routes.requests import api_key_of, open_call


async def create_chat_completion(request: Request) -> Response:
    """Continues a conversation."""
    call, fields = await open_call(request, ChatRequest)
    inputs, defaults = call.context.inputs, call.context.config.default_sampling
    media, parts = call.context.media, call.context.media_parts()
    messages = parse_messages(fields.messages, parts)
    note_ignored(call.context, call.headers, parts.ignored)
    options = call.context.chat_options(fields)
    limit = fields.token_limit()
    if limit is None and "max_tokens" in defaults:
        limit = min(defaults["max_tokens"], inputs.max_model_len)  # the model's own default may exceed what fits here
    sampling = fields.sampling_params(
        defaults,
        max_tokens=limit,
        logprobs=fields.num_top_logprobs(),
        prompt_logprobs=fields.prompt_logprobs,
    )
    wishes = call.context.media_wishes(fields.media_io_kwargs, fields.mm_processor_kwargs)
    if parts.sources and media is not None:
        asked = MediaRequest(parts.sources, wishes, (api_key_of(request), fields.cache_salt or ""))
        encoding = media.encode(messages, asked, options, fields.truncation())
        prompt = await while_connected(request, in_time(call.deadline, encoding))
        # Megabytes of base64, which nobody needs while the answer is written.
        fields.messages.clear()
        parts.sources.clear()
    else:
        prompt = await inputs.encode_chat(messages, options, fields.truncation())
    generation_request = inputs.build(
        prompt,
        sampling,
        label=call.request_id,
        arrival_time=call.arrival_time,
        priority=call.priority,
        cache_salt=fields.cache_salt,
        deadline=call.deadline,
    )
    check_num_prompt_logprobs(len(prompt.token_ids), generation_request.sampling, "prompt_logprobs")
    head = call.head("chatcmpl")
    formatter = LogprobFormatter(inputs.tokenizer, bool(fields.return_tokens_as_token_ids))
    echo = text_of_message(messages[-1]) if fields.echo and messages[-1]["role"] == "assistant" else ""
    extra: dict[str, Any] = {"prompt_text": _prompt_text(inputs, prompt, fields)} if fields.return_prompt_text else {}
    if fields.stream:
        session = call.session(fields, head, "chat.completion.chunk")
        shape = ChatShape(formatter, echo, extra)
        return call.stream(session, [generation_request], lambda _: ChoiceStream(session, shape, sampling.n))
    (output,) = await call.complete([generation_request])
    return await large_json_reply(
        lambda: (
            chat_reply(head, output, formatter, echo, bool(fields.return_token_ids)) | extra | call.metrics([output])
        ),
        num_logprobs([output]),
        call.headers,
    )


def _prompt_text(inputs: InputProcessor, prompt: Prompt, fields: ChatRequest) -> str:
    """What the template made of the messages, or what is left of it."""
    if prompt.text is not None and fields.truncate_prompt_tokens is None:
        return prompt.text
    return inputs.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
