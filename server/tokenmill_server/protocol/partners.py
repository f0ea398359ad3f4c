"""Fields that only say how what another one asks for is to be done: alone they do nothing.

The answer lists them as without effect. Where OpenAI's API refuses such a request, so does the code of that field:
`stream_options`, `top_logprobs` and `tool_choice`, and with them `logprob_token_ids`.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel


@dataclass(slots=True, frozen=True)
class Partner:
    """What a field needs."""

    names: tuple[str, ...]
    """Fields of which one must ask for something."""
    neutral: tuple[Any, ...] = ()
    """Values of the field itself that ask for nothing."""


PARTNERS = {
    "truncation_side": Partner(("truncate_prompt_tokens",)),
    "stream_interval": Partner(("stream",), (1,)),
    "length_penalty": Partner(("use_beam_search",), (1,)),
    "early_stopping": Partner(("use_beam_search",), (False,)),
    "return_tokens_as_token_ids": Partner(("logprobs", "prompt_logprobs"), (False,)),
}


def without_partner(fields: BaseModel) -> list[str]:
    """Names of fields in a request that have no effect since their partner is missing."""
    given = fields.model_fields_set & PARTNERS.keys()
    return [name for name in given if _is_alone(fields, name, PARTNERS[name])] if given else []


def _is_alone(fields: BaseModel, name: str, partner: Partner) -> bool:
    value = getattr(fields, name)
    others = [getattr(fields, other) for other in partner.names]
    return (
        value is not None and value not in partner.neutral and all(other is None or other is False for other in others)
    )
