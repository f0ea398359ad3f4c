"""Which fields go together with `use_beam_search`."""

import math
from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.processing.beam_search import BeamOptions
from tokenmill_server.protocol.fields import GenerationFields

MAX_BEAMS = 64
_MAX_PENALTY = 10.0
"""The longest answer to this power is a number."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stream", "echo", "logprobs"), (False,)),
    **dict.fromkeys(("top_logprobs", "min_tokens", "min_p"), (0,)),
    "top_k": (0, -1),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("top_p", "repetition_penalty"), (1,)),
    "temperature": (0, 1),
    "tools": (),
    "response_format": ({"type": "text"},),
    **dict.fromkeys(("stop", "bad_words", "logprob_token_ids"), ([],)),
    "logit_bias": ({},),
    "thinking_token_budget": (-1,),
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "seed", "structured_outputs", "repetition_detection"), ()),
}
"""Fields that beam search knows nothing of, with the values that ask for nothing."""


def beam_options(fields: GenerationFields) -> BeamOptions | None:
    """None: no beam search. Raises InvalidRequestError for what contradicts it."""
    if not fields.use_beam_search:
        return None
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    for name, neutral in _WITHOUT_EFFECT.items():
        value = getattr(fields, name, None)
        # A number of log-probabilities may be 0, which is one for each token; False is none.
        if value is not None and not any(value == each and (value is False) == (each is False) for each in neutral):
            raise InvalidRequestError(f"{name} and use_beam_search exclude each other", name)
    if (fields.n or 1) > MAX_BEAMS:
        raise InvalidRequestError(f"n must be at most {MAX_BEAMS} with use_beam_search, got {fields.n}", "n")
    if not (math.isfinite(penalty) and abs(penalty) <= _MAX_PENALTY):
        raise InvalidRequestError(
            f"length_penalty must be between -{_MAX_PENALTY:g} and {_MAX_PENALTY:g}", "length_penalty"
        )
    return BeamOptions(penalty, bool(fields.early_stopping))
