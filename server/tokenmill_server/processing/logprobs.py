"""Unpacks log-probabilities from the wire."""

import math

from tokenmill_engine.messages import TokenLogprobs
from tokenmill_server.processing.generation import TokenLogprob

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def unpack_logprobs(message: TokenLogprobs) -> list[TokenLogprob]:
    """One entry per position, without text."""
    width = 1 + message.num_top
    token_ids: list[int] = memoryview(message.token_ids).cast("i").tolist()
    logprobs = [_finite(value) for value in memoryview(message.logprobs).cast("f").tolist()]
    ranks: list[int] = memoryview(message.ranks).cast("i").tolist()
    entries = []
    for position, rank in enumerate(ranks):
        first, last = position * width, (position + 1) * width
        top = list(zip(token_ids[first + 1 : last], logprobs[first + 1 : last], strict=True))
        entries.append(TokenLogprob(token_ids[first], logprobs[first], rank, top))
    return entries


def _finite(value: float) -> float:
    return value if math.isfinite(value) and value > LOGPROB_FLOOR else LOGPROB_FLOOR
