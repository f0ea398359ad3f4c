"""The bodies of POST /v1/score and POST /v1/rerank, and their answers."""

from collections.abc import Sequence
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.processing.vectors import check_pairs
from tokenmill_server.protocol.fields import Int
from tokenmill_server.protocol.pooling import MAX_TEXTS, PoolingFields
from tokenmill_server.protocol.replies import Json, ReplyHead


class ScoreRequest(PoolingFields):
    """How well texts go together: one with each of several, or pairs."""

    text_1: Any = None
    text_2: Any = None
    """Each a string or a list of strings."""
    queries: Any = None
    """Another name of `text_1`."""
    documents: Any = None
    """Another name of `text_2`."""
    use_activation: bool | None = None
    """False: scores of models for pairs are as they are, not between 0 and 1."""

    def texts(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """As many of both, or one of the first; both come with the name of their field. Raises InvalidRequestError for
        anything else."""
        one, first = _named(("text_1", self.text_1), ("queries", self.queries))
        two, second = _named(("text_2", self.text_2), ("documents", self.documents))
        firsts, seconds = _texts(one, first), _texts(two, second)
        check_pairs(len(firsts), len(seconds), (one, two))
        return (one, firsts), (two, seconds)


class RerankRequest(PoolingFields):
    """Documents to be put in the order of how well they go with a query."""

    query: Any = None
    documents: Any = None
    """A list of strings, or of objects with a `text`."""
    top_n: Int | None = None
    """How many are wanted; None or 0: all."""
    use_activation: bool | None = None
    """As in `ScoreRequest`."""
    return_documents: bool | None = None
    """Whether the answer repeats them, as it does by default."""

    def texts(self) -> tuple[str, list[str]]:
        """The query and the documents. Raises InvalidRequestError for anything else."""
        if not isinstance(self.query, str):
            raise InvalidRequestError("query must be a string", "query")
        documents = self.documents
        if isinstance(documents, list):
            documents = [each.get("text") if isinstance(each, dict) else each for each in documents]
        elif isinstance(documents, str):
            documents = None
        return self.query, _texts("documents", documents)

    def check_common(self) -> None:
        """As in `CommonFields`."""
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequestError(f"top_n must be at least 0, got {self.top_n}", "top_n")
        super().check_common()


def score_reply(head: ReplyHead, scores: Sequence[float], usage: Json) -> Json:
    return {
        "id": head.id,
        "object": "list",
        "created": head.created,
        "model": head.model,
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)],
        "usage": usage,
    }


def rerank_reply(
    head: ReplyHead, fields: RerankRequest, documents: Sequence[str], scores: Sequence[float], usage: Json
) -> Json:
    """The best first; of equal ones the first. `documents`: as texts."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n or None]
    results: list[Json] = []
    for index in order:
        document = {} if fields.return_documents is False else {"document": {"text": documents[index]}}
        results.append({"index": index, **document, "relevance_score": scores[index]})
    return {"id": head.id, "model": head.model, "results": results, "usage": usage}


def _named(first: tuple[str, Any], second: tuple[str, Any]) -> tuple[str, Any]:
    """Of a field with two names the one that is given."""
    if first[1] is not None and second[1] is not None:
        raise InvalidRequestError(f"{second[0]} is another name of {first[0]}; give one of them", second[0])
    return second if second[1] is not None else first


def _texts(param: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"{param} must be texts, at least one", param)
    if len(texts) > MAX_TEXTS:
        raise InvalidRequestError(f"at most {MAX_TEXTS} texts are allowed, got {len(texts)}", param)
    return texts
