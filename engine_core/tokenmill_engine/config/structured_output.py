"""How structured outputs are made."""

from dataclasses import dataclass
from typing import Final, Literal

MAX_WHITESPACE: Final = 32
"""Characters in a row between the parts of JSON: models that have nothing to say would write it for ever."""

StructuredBackend = Literal["auto", "xgrammar", "guidance"]


@dataclass(frozen=True, slots=True)
class StructuredOutputConfig:
    """What holds where a request says nothing else."""

    backend: StructuredBackend = "auto"
    any_whitespace: bool = True
    """Between the parts of JSON."""
    additional_properties: bool = False
    """Objects that name properties may have others, unless the schema forbids it."""
    jump_forward: bool = True
    """Text that has to follow is not sampled."""
