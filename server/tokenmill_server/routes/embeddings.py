"""POST /v1/embeddings"""

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.processing.input_processor import Prompt
from tokenmill_server.processing.vectors import VectorInputs, embedding_of
from tokenmill_server.protocol.embeddings import EmbeddingRequest, embedding_reply
from tokenmill_server.routes.bodies import large_json_reply
from tokenmill_server.routes.pooling import open_pooling_call, run_prompts, usage_of_vectors, vectors_of


async def create_embeddings(request: Request) -> Response:
    """A vector of each text."""
    call, fields = await open_pooling_call(request, EmbeddingRequest)
    vectors = vectors_of(call.context)
    vectors.check_embeds(call.context.model_name, "/v1/score or /v1/rerank")
    num_dimensions = vectors.num_dimensions(fields.dimensions)
    normalize = fields.wants_unit_length(vectors.pooling.normalize)
    outputs = await run_prompts(call, await _prompts(vectors, fields))
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
