"""What requests to models that make vectors have in common, and their usage."""

from typing import Literal

from tokenmill_server.processing.input_processor import Truncation
from tokenmill_server.protocol.fields import CommonFields, Int
from tokenmill_server.protocol.replies import Json

MAX_TEXTS = 2048
"""Of one field."""


class PoolingFields(CommonFields):
    """What requests for vectors, and for what is made of them, have in common."""

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def truncation(self) -> Truncation | None:
        """Without a side texts keep their beginning."""
        if self.truncate_prompt_tokens is None:
            return None
        return Truncation(self.truncate_prompt_tokens, self.truncation_side or "right")

    def without_effect_on_pairs(self) -> list[str]:
        """Fields that ask for what models for pairs do not do: they read the tokens around texts, too, and of texts
        that are cut always the beginning."""
        keeps_ends = self.truncation_side == "left" and self.truncate_prompt_tokens is not None
        asked = {"add_special_tokens": self.add_special_tokens is False, "truncation_side": keeps_ends}
        return [name for name, is_asked in asked.items() if is_asked]


def vector_usage(num_prompt_tokens: int, num_cached_tokens: int) -> Json:
    """Nothing is generated."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "total_tokens": num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
