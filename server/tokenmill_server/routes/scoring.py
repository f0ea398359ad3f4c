"""POST /v1/score and POST /v1/rerank, also without the version: how well texts go together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.processing.generation import RequestOutput
from tokenmill_server.processing.vectors import cosines, pairs_of, score_of
from tokenmill_server.protocol.scoring import RerankRequest, ScoreRequest, rerank_reply, score_reply
from tokenmill_server.routes.bodies import large_json_reply
from tokenmill_server.routes.ignored import note_ignored
from tokenmill_server.routes.pooling import open_pooling_call, run_prompts, usage_of_vectors, vectors_of
from tokenmill_server.routes.requests import Call


@dataclass(slots=True, frozen=True)
class _Scored:
    """What the engine made of texts, or of pairs of them, each of which it has seen once."""

    outputs: list[RequestOutput]
    scores: Callable[[], list[float]]
    """What comes of that, for each of the second texts: for many a matter of milliseconds."""
    num_values: int
    """How many numbers that looks at."""


async def create_score(request: Request) -> Response:
    """A number for each pair of texts."""
    call, fields = await open_pooling_call(request, ScoreRequest)
    scored, head = await _score(call, fields, *fields.texts()), call.head("score")
    return await large_json_reply(
        lambda: score_reply(head, scored.scores(), usage_of_vectors(scored.outputs)), scored.num_values, call.headers
    )


async def create_rerank(request: Request) -> Response:
    """Documents in the order of how well they go with a query."""
    call, fields = await open_pooling_call(request, RerankRequest)
    query, documents = fields.texts()
    scored = await _score(call, fields, ("query", [query]), ("documents", documents))
    head = call.head("rerank")
    return await large_json_reply(
        lambda: rerank_reply(head, fields, documents, scored.scores(), usage_of_vectors(scored.outputs)),
        scored.num_values,
        call.headers,
    )


async def _score(
    call: Call,
    fields: ScoreRequest | RerankRequest,
    first: tuple[str, Sequence[str]],
    second: tuple[str, Sequence[str]],
) -> _Scored:
    """What a model for pairs says of two texts, or else the cosine of their vectors, for each of the second; both come
    with the name of their field."""
    vectors, truncation = vectors_of(call.context), fields.truncation()
    if vectors.pooling.scores_pairs:
        note_ignored(call.context, call.headers, fields.without_effect_on_pairs())
        squash = vectors.pooling.squash if fields.use_activation is None else fields.use_activation
        prompts = await vectors.encode_pairs(pairs_of(first[1], second[1]), truncation, (first[0], second[0]))
        outputs = await run_prompts(call, prompts)
        return _Scored(outputs, lambda: [score_of(output, squash) for output in outputs], len(outputs))
    if fields.use_activation is not None:
        note_ignored(call.context, call.headers, ["use_activation"])
    prompts = []
    for param, texts in (first, second):
        prompts += await vectors.encode(texts, truncation, param, fields.add_special_tokens is not False)
    outputs, num_first = await run_prompts(call, prompts), len(first[1])
    num_values = len(outputs) * vectors.size
    return _Scored(outputs, lambda: cosines(outputs[:num_first], outputs[num_first:]), num_values)
