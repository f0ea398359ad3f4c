"""POST /v1/embeddings"""

from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.context import ServerContext
from tokenmill_server.processing.generation import RequestOutput
from tokenmill_server.processing.input_processor import Prompt
from tokenmill_server.processing.vectors import VectorInputs, embedding_of
from tokenmill_server.protocol.embeddings import EmbeddingRequest, PoolingFields, embedding_reply, vector_usage
from tokenmill_server.protocol.fields import ignored_fields
from tokenmill_server.protocol.replies import Json
from tokenmill_server.routes.bodies import large_json_reply
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.requests import Call, begin_call


async def create_embeddings(request: Request) -> Response:
    """A vector of each text."""
    call, body, fields = await begin_call(request, EmbeddingRequest, makes_vectors=True)
    note_ignored(call.context, call.headers, ignored_fields(body, EmbeddingRequest.model_fields))
    vectors = vectors_of(call.context)
    num_dimensions = fields.num_dimensions(call.context.engine_config.model.architecture.hidden_size)
    normalize = fields.wants_unit_length(vectors.pooling.normalize)
    outputs = await run_prompts(call, await _prompts(vectors, fields), fields)
    head = call.head("embd")
    return await large_json_reply(
        lambda: embedding_reply(
            head,
            [embedding_of(output, normalize, num_dimensions) for output in outputs],
            usage_of_vectors(outputs),
            fields.encoding_format,
        ),
        len(outputs) * num_dimensions,
        call.headers,
    )


async def _prompts(vectors: VectorInputs, fields: EmbeddingRequest) -> list[Prompt]:
    inputs, truncation = fields.inputs(), fields.truncation()
    texts = [each for each in inputs if isinstance(each, str)]
    if texts:
        return await vectors.encode(texts, truncation, "input", fields.add_special_tokens is not False)
    return [vectors.take_token_ids(each, truncation, "input") for each in inputs if not isinstance(each, str)]


async def run_prompts(call: Call, prompts: Sequence[Prompt], fields: PoolingFields) -> list[RequestOutput]:
    """What the engine makes of prompts, in their order. Raises as `Call.complete`, and for prompts that are wrong."""
    vectors = vectors_of(call.context)
    requests = [
        vectors.build(
            prompt,
            label=call.request_id,
            arrival_time=call.arrival_time,
            priority=call.priority,
            deadline=call.deadline,
        )
        for prompt in prompts
    ]
    return await call.complete(requests)


def vectors_of(context: ServerContext) -> VectorInputs:
    """Of a server whose model makes them, which `begin_call` has seen to."""
    if context.vectors is None:
        raise TypeError("the model generates text")
    return context.vectors


def usage_of_vectors(outputs: Sequence[RequestOutput]) -> Json:
    return vector_usage(
        sum(len(output.prompt_token_ids) for output in outputs), sum(output.num_cached_tokens for output in outputs)
    )
