"""POST /v1/chat/completions"""

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.deadlines import in_time
from tokenmill_server.multimodal.media_request import MediaRequest
from tokenmill_server.parsing.plan import OutputPlan
from tokenmill_server.processing.chat_template import text_of_message
from tokenmill_server.processing.generation import CompletionOutput, GenerationRequest
from tokenmill_server.processing.input_processor import InputProcessor, Prompt
from tokenmill_server.processing.sampling_checks import check_num_prompt_logprobs
from tokenmill_server.protocol.chat import ChatRequest, parse_messages
from tokenmill_server.protocol.chunks import ChatShape, ChoiceStream
from tokenmill_server.protocol.logprobs import num_logprobs
from tokenmill_server.protocol.parsed_chat import ParsedChat, ParsedChoiceStream
from tokenmill_server.protocol.replies import Json, chat_choice, chat_reply
from tokenmill_server.routes.bodies import large_json_reply
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.output_plan import (
    fitted_to,
    plan_output,
    with_grammar_of_calls,
    with_tools,
    without_effect,
)
from tokenmill_server.routes.replying import while_connected
from tokenmill_server.routes.requests import Call, api_key_of, open_call


async def create_chat_completion(request: Request) -> Response:
    """Continues a conversation."""
    call, fields = await open_call(request, ChatRequest)
    inputs, defaults = call.context.inputs, call.context.config.default_sampling
    media, parts = call.context.media, call.context.media_parts()
    messages = parse_messages(fields.messages, parts)
    tools = fields.tool_use()
    options = with_tools(call.context, call.context.chat_options(fields), tools)
    unused = without_effect(call.context, fields, options, tools, messages)
    note_ignored(call.context, call.headers, [*parts.ignored, *options.unread, *unused])
    limit = fields.token_limit(inputs.max_model_len)
    if limit is None and "max_tokens" in defaults:
        limit = min(defaults["max_tokens"], inputs.max_model_len)  # the model's own default may exceed what fits here
    sampling = fields.sampling_params(
        defaults,
        max_tokens=limit,
        logprobs=fields.num_top_logprobs(),
        prompt_logprobs=fields.prompt_logprobs,
    )
    sampling = with_grammar_of_calls(call.context, sampling, fields, tools)
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
    plan = plan_output(call.context, fields, tools, messages, prompt.text or "")
    generation_request = inputs.build(
        prompt,
        fitted_to(plan, sampling, inputs.tokenizer),
        label=call.request_id,
        arrival_time=call.arrival_time,
        priority=call.priority,
        cache_salt=fields.cache_salt,
        deadline=call.deadline,
    )
    check_num_prompt_logprobs(len(prompt.token_ids), generation_request.sampling, "prompt_logprobs")
    echo = text_of_message(messages[-1]) if fields.echo and messages[-1]["role"] == "assistant" else ""
    extra: Json = {"prompt_text": _prompt_text(inputs, prompt, fields)} if fields.return_prompt_text else {}
    formatter = call.formatter(fields)
    return await _answer(call, fields, generation_request, plan, ChatShape(formatter, echo, extra))


async def _answer(
    call: Call, fields: ChatRequest, request: GenerationRequest, plan: OutputPlan | None, shape: ChatShape
) -> Response:
    """As the client wants it: streamed or whole, parsed or as it is."""
    tokenizer, head = call.context.inputs.tokenizer, call.head("chatcmpl")
    parsed = None if plan is None else ParsedChat(plan, shape.formatter, tokenizer.token_bytes)
    num_choices, with_token_ids = request.sampling.n, bool(fields.return_token_ids)
    if fields.stream:
        session = call.session(fields, head, "chat.completion.chunk")
        if parsed is not None:
            return call.stream(session, [request], lambda _: ParsedChoiceStream(session, shape, parsed, num_choices))
        return call.stream(session, [request], lambda _: ChoiceStream(session, shape, num_choices))
    (output,) = await call.complete([request])

    def body_of(choice: CompletionOutput) -> Json:
        if parsed is not None:
            return parsed.choice(choice, shape.echo, with_token_ids)
        return chat_choice(choice, shape.formatter, shape.echo, with_token_ids)

    def reply() -> Json:
        body = chat_reply(
            head,
            output,
            shape.formatter,
            body_of,
            return_token_ids=with_token_ids,
            reasoning_tokens=None if parsed is None else parsed.reasoning_tokens(output.outputs),
        )
        return body | shape.opening | call.metrics([output])

    return await large_json_reply(reply, num_logprobs([output]), call.headers)


def _prompt_text(inputs: InputProcessor, prompt: Prompt, fields: ChatRequest) -> str:
    """What the template made of the messages, or what is left of it."""
    if prompt.text is not None and fields.truncate_prompt_tokens is None:
        return prompt.text
    return inputs.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
