"""What the routes of models that make vectors do alike."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from fastapi import Request

from tokenmill_server.context import ServerContext
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput
from tokenmill_server.processing.input_processor import Prompt
from tokenmill_server.processing.vectors import VectorInputs
from tokenmill_server.protocol.fields import ignored_fields
from tokenmill_server.protocol.partners import without_partner
from tokenmill_server.protocol.pooling import PoolingFields, vector_usage
from tokenmill_server.protocol.replies import Json
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.requests import Call, begin_call

FieldsT = TypeVar("FieldsT", bound=PoolingFields)

_MAX_INLINE = 256
"""Requests that are built without a thread: a few milliseconds."""


async def open_pooling_call(request: Request, model: type[FieldsT]) -> tuple[Call, FieldsT]:
    """Reads and checks what every route of vectors checks. Raises as `begin_call`."""
    call, body, fields = await begin_call(request, model, makes_vectors=True)
    ignored = ignored_fields(body, model.model_fields) + without_partner(fields)
    note_ignored(call.context, call.headers, sorted(ignored))
    return call, fields


async def run_prompts(call: Call, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    """What the engine makes of prompts, in their order. Raises as `Call.complete`, and for prompts that are wrong."""
    vectors = vectors_of(call.context)

    def build() -> list[GenerationRequest]:
        return [
            vectors.build(
                prompt,
                label=call.request_id,
                arrival_time=call.arrival_time,
                priority=call.priority,
                deadline=call.deadline,
            )
            for prompt in prompts
        ]

    return await call.complete(build() if len(prompts) <= _MAX_INLINE else await asyncio.to_thread(build))


def vectors_of(context: ServerContext) -> VectorInputs:
    """Of a server whose model makes them, which `begin_call` has seen to."""
    if context.vectors is None:
        raise TypeError("the model generates text")
    return context.vectors


def usage_of_vectors(outputs: Sequence[RequestOutput]) -> Json:
    return vector_usage(
        sum(len(output.prompt_token_ids) for output in outputs), sum(output.num_cached_tokens for output in outputs)
    )
