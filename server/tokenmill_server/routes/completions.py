"""POST /v1/completions"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import FinishReason
from tokenmill_server.processing.generation import CompletionOutput, GenerationRequest, RequestOutput
from tokenmill_server.processing.input_processor import Prompt
from tokenmill_server.processing.output_processor import Generation
from tokenmill_server.processing.sampling_checks import (
    MAX_CHOICES,
    MAX_PROMPT_LOGPROBS,
    MAX_STREAMED_PROMPT_LOGPROBS,
    check_num_prompt_logprobs,
)
from tokenmill_server.processing.sse import DONE
from tokenmill_server.protocol.chunks import ChoiceStream, CompletionShape
from tokenmill_server.protocol.completions import CompletionRequest
from tokenmill_server.protocol.echo import EchoedPrompt, echo_prompt
from tokenmill_server.protocol.logprobs import LogprobFormatter, num_logprobs
from tokenmill_server.protocol.replies import Json, Usage, completion_reply, usage_of
from tokenmill_server.routes.bodies import large_json_reply
from tokenmill_server.routes.requests import Call, open_call


async def create_completion(request: Request) -> Response:
    """Continues one or several texts."""
    call, fields = await open_call(request, CompletionRequest)
    job = await _prepare(call, fields)
    if job.prompt_only:
        return await _prompt_only(call, fields, job)
    head = call.head("cmpl")
    if fields.stream:
        session = call.session(fields, head, "text_completion")
        shape = CompletionShape(job.formatter, job.echo if fields.echo else None)
        return call.stream(
            session, job.requests, lambda index: ChoiceStream(session, shape, job.num_choices, index * job.num_choices)
        )
    outputs = await call.complete(job.requests)
    return await large_json_reply(
        lambda: completion_reply(head, _choices(outputs, fields, job), usage_of(outputs)) | call.metrics(outputs),
        num_logprobs(outputs),
        call.headers,
    )


@dataclass(slots=True, frozen=True)
class _Job:
    """The prompts of a request, ready to run."""

    requests: Sequence[GenerationRequest]
    num_choices: int
    """Per prompt."""
    prompt_only: bool
    """Nothing is generated: `max_tokens` is 0."""
    formatter: LogprobFormatter
    call: Call

    def echo(self, generation: Generation) -> EchoedPrompt:
        request = generation.request
        tokenizer = self.call.context.inputs.tokenizer
        return echo_prompt(tokenizer, request.prompt, request.prompt_token_ids, generation.prompt_logprobs())


async def _prepare(call: Call, fields: CompletionRequest) -> _Job:
    """Tokenizes and checks every prompt before any of them starts."""
    inputs = call.context.inputs
    limit = fields.token_limit()
    if fields.max_tokens is None:
        limit = min(limit, inputs.max_model_len)  # a default of ours is not the client's error
    echoed_logprobs = fields.logprobs if fields.echo else None
    sampling = fields.sampling_params(
        call.context.config.default_sampling,
        max_tokens=limit or 1,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs if fields.prompt_logprobs is not None else echoed_logprobs,
    )
    prompts = await _encode(call, fields)
    if len(prompts) > 1 and len(prompts) * sampling.n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n {sampling.n} make more than {MAX_CHOICES} choices", "n"
        )
    requests = [
        inputs.build(
            prompt,
            sampling,
            label=call.request_id,
            arrival_time=call.arrival_time,
            priority=call.priority,
            cache_salt=fields.cache_salt,
            deadline=call.deadline,
        )
        for prompt in prompts
    ]
    check_num_prompt_logprobs(
        sum(len(prompt.token_ids) for prompt in prompts),
        requests[0].sampling,
        "logprobs" if fields.prompt_logprobs is None else "prompt_logprobs",
        MAX_STREAMED_PROMPT_LOGPROBS if fields.stream and limit else MAX_PROMPT_LOGPROBS,
    )
    formatter = call.formatter(fields)
    return _Job(requests, sampling.n, limit == 0, formatter, call)


async def _encode(call: Call, fields: CompletionRequest) -> list[Prompt]:
    inputs, truncation = call.context.inputs, fields.truncation()
    texts: list[str] = []
    prompts: list[Prompt] = []
    for prompt in fields.prompts():
        if isinstance(prompt, str):
            texts.append(prompt)
        else:
            prompts.append(inputs.take_token_ids(prompt, truncation))
    if fields.suffix:
        texts = _filled_in(call, fields, texts)
    if texts:
        return await inputs.encode_texts(texts, fields.add_special_tokens is not False, truncation)
    return prompts


def _filled_in(call: Call, fields: CompletionRequest, texts: list[str]) -> list[str]:
    """Prompts for what stands between `texts` and the suffix. Raises InvalidRequestError if that cannot be asked."""
    form = call.context.inputs.fill_in_middle
    if form is None:
        raise InvalidRequestError(
            "suffix is not supported: this model has no tokens for filling in the middle of a text",
            "suffix",
            "unsupported_parameter",
        )
    if not texts:
        raise InvalidRequestError("suffix needs prompts of text, not of token ids", "suffix")
    if fields.echo:
        raise InvalidRequestError("suffix and echo exclude each other: the text would not be in order", "suffix")
    return [form.prompt(text, fields.suffix or "") for text in texts]


def _choices(outputs: Sequence[RequestOutput], fields: CompletionRequest, job: _Job) -> list[Json]:
    choices: list[Json] = []
    tokenizer = job.call.context.inputs.tokenizer
    for output in outputs:
        echoed = None
        if fields.echo:
            echoed = echo_prompt(tokenizer, output.prompt, output.prompt_token_ids, output.prompt_logprobs)
        for completion in output.outputs:
            choice = _choice(len(choices), completion, echoed, job.formatter)
            if fields.prompt_logprobs is not None and output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = job.formatter.prompt(output.prompt_logprobs)
            if fields.return_token_ids:
                choice["token_ids"] = completion.token_ids
                choice["prompt_token_ids"] = list(output.prompt_token_ids)
            choices.append(choice)
    return choices


def _choice(index: int, output: CompletionOutput, echoed: EchoedPrompt | None, formatter: LogprobFormatter) -> Json:
    logprobs = None
    if output.logprobs is not None:
        prompt_entries, pieces = (echoed.entries, echoed.pieces) if echoed is not None else ([], [])
        texts = [*pieces, *(entry.text for entry in output.logprobs)]
        logprobs = formatter.completion([*prompt_entries, *output.logprobs], texts, 0)
    return {
        "index": index,
        "text": output.text if echoed is None else echoed.text + output.text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }


async def _prompt_only(call: Call, fields: CompletionRequest, job: _Job) -> Response:
    """Scores the prompts. The engine only works if log-probabilities are wanted, and what it generates is dropped."""
    if job.requests[0].sampling.prompt_logprobs is None:
        outputs = [_unscored(request) for request in job.requests]
    else:
        outputs = await call.complete(job.requests)
    for output in outputs:
        for completion in output.outputs:
            completion.text, completion.token_ids = "", []
            completion.finish_reason, completion.stop_reason = FinishReason.LENGTH, None
            completion.logprobs = None if fields.logprobs is None else []
    head, usage = call.head("cmpl"), usage_of(outputs)
    if not fields.stream:
        return await large_json_reply(
            lambda: completion_reply(head, _choices(outputs, fields, job), usage), num_logprobs(outputs), call.headers
        )
    choices = await asyncio.to_thread(_choices, outputs, fields, job)
    return _streamed(call, fields, choices, usage)


def _unscored(request: GenerationRequest) -> RequestOutput:
    outputs = [CompletionOutput(index) for index in range(request.sampling.n)]
    return RequestOutput(request.label, request.prompt, request.prompt_token_ids, outputs)


def _streamed(call: Call, fields: CompletionRequest, choices: list[Json], usage: Usage) -> Response:
    """An answer that is complete already, as a stream."""
    session = call.session(fields, call.head("cmpl"), "text_completion")
    extra = {"usage": usage.body()} if session.options.continuous_usage else None
    events = [session.chunk(choice, extra) for choice in choices]
    if session.options.include_usage:
        events.append(session.usage_chunk(usage))
    return Response(b"".join([*events, DONE]), media_type="text/event-stream", headers=call.headers)
