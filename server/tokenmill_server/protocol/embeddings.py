"""The body of POST /v1/embeddings, and its answer."""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.processing.vectors import Vector
from tokenmill_server.protocol.fields import Int
from tokenmill_server.protocol.pooling import MAX_TEXTS, PoolingFields
from tokenmill_server.protocol.prompts import read_prompts
from tokenmill_server.protocol.replies import Json, ReplyHead


class EmbeddingRequest(PoolingFields):
    """Texts to be embedded."""

    input: Any = None
    """str, list of str, list of token ids, or list of lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    """How many numbers of each vector are wanted."""
    normalize: bool | None = None
    use_activation: bool | None = None
    """Another name of `normalize`."""
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None
    messages: Any = None
    """Conversations are not embedded: to be given as None only."""

    def inputs(self) -> list[str] | list[list[int]]:
        """Raises InvalidRequestError for anything else than the four forms."""
        return read_prompts(self.input, "input", MAX_TEXTS)

    def check_common(self) -> None:
        """As in `CommonFields`."""
        if self.messages is not None:
            raise InvalidRequestError(
                "messages is not supported by this route; give texts as input", "messages", "unsupported_parameter"
            )
        if self.normalize is not None and self.use_activation not in (None, self.normalize):
            raise InvalidRequestError("use_activation contradicts normalize; leave one out", "use_activation")
        super().check_common()

    def wants_unit_length(self, default: bool) -> bool:
        """Whether vectors are to have length 1."""
        asked = self.use_activation if self.normalize is None else self.normalize
        return default if asked is None else asked


def embedding_reply(head: ReplyHead, vectors: Sequence[Vector], usage: Json, encoding: str | None) -> Json:
    """Vectors in the order of the inputs; as base64 they are float32, little-endian."""
    return {
        "id": head.id,
        "object": "list",
        "created": head.created,
        "model": head.model,
        "data": [
            {"index": index, "object": "embedding", "embedding": _encoded(vector, encoding)}
            for index, vector in enumerate(vectors)
        ],
        "usage": usage,
    }


def _encoded(vector: Vector, encoding: str | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
    numbers: list[float] = vector.astype(np.float64).tolist()
    return numbers
