"""POST /v1/score and POST /v1/rerank, also without the version: how well texts go together."""

from collections.abc import Sequence

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.processing.generation import RequestOutput
from tokenmill_server.processing.vectors import cosines, pairs_of, score_of
from tokenmill_server.protocol.scoring import RerankRequest, ScoreRequest, rerank_reply, score_reply
from tokenmill_server.routes.bodies import json_reply
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.pooling import open_pooling_call, run_prompts, usage_of_vectors, vectors_of
from tokenmill_server.routes.requests import Call


async def create_score(request: Request) -> Response:
    """A number for each pair of texts."""
    call, fields = await open_pooling_call(request, ScoreRequest)
    scores, outputs = await _score(call, fields, *fields.texts())
    return json_reply(score_reply(call.head("score"), scores, usage_of_vectors(outputs)), call.headers)


async def create_rerank(request: Request) -> Response:
    """Documents in the order of how well they go with a query."""
    call, fields = await open_pooling_call(request, RerankRequest)
    query, documents = fields.texts()
    num_wanted, shows = fields.num_wanted(), fields.return_documents is not False
    scores, outputs = await _score(call, fields, ("query", [query]), ("documents", documents))
    reply = rerank_reply(call.head("rerank"), documents, scores, num_wanted, shows, usage_of_vectors(outputs))
    return json_reply(reply, call.headers)


async def _score(
    call: Call,
    fields: ScoreRequest | RerankRequest,
    first: tuple[str, Sequence[str]],
    second: tuple[str, Sequence[str]],
) -> tuple[list[float], list[RequestOutput]]:
    """What a model for pairs says of two texts, or else the cosine of their vectors, for each of the second; both come
    with the name of their field. And what the engine made of all pairs, or of all texts, each of which it has seen
    once."""
    vectors, truncation = vectors_of(call.context), fields.truncation()
    if vectors.pooling.scores_pairs:
        note_ignored(call.context, call.headers, fields.without_effect_on_pairs())
        squash = vectors.pooling.normalize if fields.use_activation is None else fields.use_activation
        prompts = await vectors.encode_pairs(pairs_of(first[1], second[1]), truncation, (first[0], second[0]))
        outputs = await run_prompts(call, prompts)
        return [score_of(output, squash) for output in outputs], outputs
    if fields.use_activation is not None:
        note_ignored(call.context, call.headers, ["use_activation"])
    prompts = []
    for param, texts in (first, second):
        prompts += await vectors.encode(texts, truncation, param, fields.add_special_tokens is not False)
    outputs = await run_prompts(call, prompts)
    num_first = len(first[1])
    return cosines(outputs[:num_first], outputs[num_first:]), outputs
