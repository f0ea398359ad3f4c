"""What the routes do alike that have the model do something: headers, identity of the answer, start of streams."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.balancing.load_balancer import RANK_HEADER
from tokenmill_server.beam_searching import search_beams
from tokenmill_server.context import ServerContext, context_of
from tokenmill_server.deadlines import TIMEOUT_HEADER
from tokenmill_server.processing.beam_search import BeamOptions
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput
from tokenmill_server.processing.output_processor import OutputListener
from tokenmill_server.processing.sse import EventBuffer
from tokenmill_server.protocol.beams import beam_options
from tokenmill_server.protocol.chunks import StreamOptionsInEffect, StreamSession
from tokenmill_server.protocol.fields import CommonFields, GenerationFields, ignored_fields, refuse_unsupported
from tokenmill_server.protocol.logprobs import LogprobFormatter
from tokenmill_server.protocol.partners import without_partner
from tokenmill_server.protocol.replies import ReplyHead
from tokenmill_server.request_log import ANSWER, answer_of, answer_so_far, quotes_of
from tokenmill_server.routes.bodies import Json, ModelT, parse, read_json
from tokenmill_server.routes.headers import header, integer_header
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.replying import EventStreamResponse, while_connected

_MAX_TIMEOUT_MS = 7 * 24 * 3600 * 1000


@dataclass(slots=True)
class Call:
    """One HTTP request that has the model do something."""

    context: ServerContext
    request: Request
    arrival_time: float
    """Seconds of `time.monotonic`."""
    request_id: str
    pinned_engine: int | None
    priority: int
    deadline: float | None
    """Seconds of `time.monotonic`."""
    beams: BeamOptions | None
    """None: no beam search; always so where no text is generated."""
    headers: dict[str, str]
    """Of the answer."""

    def head(self, prefix: str) -> ReplyHead:
        return ReplyHead(
            id=f"{prefix}-{self.request_id}",
            created=int(time.time()),
            model=self.context.model_name,
            fingerprint=self.context.fingerprint,
        )

    def session(self, fields: GenerationFields, head: ReplyHead, kind: str) -> StreamSession:
        options, forced = fields.stream_options, self.context.config.force_include_usage
        return StreamSession(
            EventBuffer(),
            head,
            kind,
            StreamOptionsInEffect(
                interval=max(self.context.config.stream_interval, fields.stream_interval or 1),
                include_usage=forced or bool(options and options.include_usage),
                continuous_usage=forced or bool(options and options.continuous_usage_stats),
                return_token_ids=bool(fields.return_token_ids),
                timings=self.context.config.per_request_metrics,
            ),
        )

    async def complete(self, requests: Sequence[GenerationRequest]) -> list[RequestOutput]:
        """The whole answers to all prompts. Raises OverloadedError if they are too many now."""
        self._admit(requests)
        if self.beams is not None:
            searching = search_beams(self.context, requests, self.beams, self.pinned_engine)
            outputs = await while_connected(self.request, searching)
        else:
            working = self.context.generator.complete_all(requests, self.pinned_engine)
            outputs = await while_connected(self.request, working)
        if self.context.config.log_requests:
            self.request.scope["state"][ANSWER] = answer_of(outputs, quotes_of(self.context.config))
        return outputs

    def formatter(self, fields: GenerationFields) -> LogprobFormatter:
        """How tokens are called in log-probabilities."""
        as_token_ids = fields.return_tokens_as_token_ids
        if as_token_ids is None:
            as_token_ids = self.context.config.return_tokens_as_token_ids
        return LogprobFormatter(self.context.inputs.tokenizer, as_token_ids)

    def metrics(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Times of the answer to one prompt, as a field of the reply, if the server tells them."""
        if not self.context.config.per_request_metrics or len(outputs) != 1 or outputs[0].timings is None:
            return {}
        return {"metrics": outputs[0].timings}

    def _admit(self, requests: Sequence[GenerationRequest]) -> None:
        if self.context.admission is not None:
            self.context.admission.check(requests)

    def stream(
        self,
        session: StreamSession,
        requests: Sequence[GenerationRequest],
        listener: Callable[[int], OutputListener],
    ) -> Response:
        """Starts the generation of every prompt; `listener(i)` gets the output of the i-th."""
        generator = self.context.generator
        self._admit(requests)

        def close() -> None:
            if self.context.config.log_requests and session.generations:
                self.request.scope["state"][ANSWER] = answer_so_far(session.generations, quotes_of(self.context.config))
            for generation in session.generations:
                generator.close_generation(generation)
            session.generations.clear()

        listeners = [listener(index) for index in range(len(requests))]
        try:
            for request, its_listener in zip(requests, listeners, strict=True):
                generation = generator.start(request, its_listener, self.pinned_engine)
                session.generations.append(generation)
                if self.context.config.log_outputs:
                    generation.keep_texts()
        except BaseException:
            close()
            raise
        return EventStreamResponse(session.buffer, close, self.headers, self.context.config.sse_keep_alive_s)


async def open_call(request: Request, model: type[ModelT]) -> tuple[Call, ModelT]:
    """Reads and checks what every generating route checks.

    Raises RequestError, pydantic's ValidationError, or OverloadedError while the server takes no work.
    """
    call, body, fields = await begin_call(request, model, makes_vectors=False)
    if not isinstance(fields, GenerationFields):
        raise TypeError(f"{model.__name__} is no model of a generating route")
    call.beams = beam_options(fields)
    ignored = ignored_fields(body, model.model_fields) + without_partner(fields)
    note_ignored(call.context, call.headers, sorted(ignored))
    return call, fields


async def begin_call(request: Request, model: type[ModelT], *, makes_vectors: bool) -> tuple[Call, Json, ModelT]:
    """Reads and checks what every route checks that has the model do something, in the order in which a client should
    hear of it: the call, and the body as it came and as it was read. `makes_vectors`: what the route is for.

    Raises RequestError, pydantic's ValidationError, or OverloadedError while the server takes no work.
    """
    arrival_time = time.monotonic()
    context = context_of(request)
    body = await read_json(request, context.config.max_body_bytes)
    context.readiness.check()
    if context.admission is not None:
        context.admission.check_room()
    refuse_unsupported(body, model.model_fields)
    fields = parse(body, model)
    if not isinstance(fields, CommonFields):
        raise TypeError(f"{model.__name__} is no model of a route that needs the model")
    context.check_model(fields.model)
    context.check_use(makes_vectors)
    fields.check_common()
    state = request.scope["state"]
    if fields.request_id is not None and not state["has_own_id"]:
        state["request_id"] = fields.request_id
    priority = integer_header(request, "X-Vllm-Priority")
    rank = integer_header(request, RANK_HEADER)
    call = Call(
        context=context,
        request=request,
        arrival_time=arrival_time,
        request_id=state["request_id"],
        pinned_engine=None if rank is None else context.engine_of(rank),
        deadline=_deadline(request, arrival_time),
        priority=priority if priority is not None else fields.priority or 0,
        beams=None,
        headers={},
    )
    return call, body, fields


def api_key_of(request: Request) -> str:
    """The key that the client shows, whether one is needed or not; empty if none. Clients with different ones have
    nothing to do with each other."""
    return header(request, b"authorization").partition(" ")[2].strip()


def _deadline(request: Request, arrival_time: float) -> float | None:
    timeout_ms = integer_header(request, TIMEOUT_HEADER)
    if timeout_ms is None:
        return None
    if not 0 < timeout_ms <= _MAX_TIMEOUT_MS:
        raise InvalidRequestError(
            f"the header {TIMEOUT_HEADER} must be between 1 and {_MAX_TIMEOUT_MS}, got {timeout_ms}", TIMEOUT_HEADER
        )
    return arrival_time + timeout_ms / 1000
