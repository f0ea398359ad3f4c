"""What one flag is: a row of the table that the command line, config files, environment and `LLM(...)` share."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tokenmill_server.flags.parsers import Parser


class Group(StrEnum):
    """Headings of `--help`."""

    MODEL = "Model"
    FRONTEND = "Frontend"
    PARALLEL = "Parallel"
    FAULTS = "Faults"
    CACHE = "Cache"
    SCHEDULER = "Scheduler"
    MULTIMODAL = "Multimodal"
    DEVICE = "Device"
    OBSERVABILITY = "Observability"


class Arity(StrEnum):
    """How many values follow the flag on the command line."""

    SWITCH = "switch"
    """None: `--x` is true, `--no-x` false."""
    ONE = "one"
    REPEATED = "repeated"
    """One; the flag may be repeated, each adds a value."""
    MANY = "many"
    """One or more; the flag may be repeated, each adds values."""


@dataclass(frozen=True, slots=True)
class EnvAlias:
    """An environment variable beside `TOKENMILL_<FLAG>`; `unit` multiplies a number (GiB to bytes)."""

    name: str
    unit: int = 1


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. `default` is what holds when nobody sets it; None means that the value follows from others,
    as `help` says. `destination` is the field of the configuration tree that it ends in, `section.field`."""

    name: str
    """With dashes, without the leading two."""
    group: Group
    parse: Parser
    default: Any
    help: str
    destination: str
    metavar: str = ""
    short: tuple[str, ...] = ()
    arity: Arity = Arity.ONE
    offline: bool = True
    """Whether `LLM(...)` takes it; the others are about serving over HTTP."""
    env: tuple[EnvAlias, ...] = field(default=())

    @property
    def key(self) -> str:
        """The name as a Python keyword."""
        return self.name.replace("-", "_")

    @property
    def environment_variable(self) -> str:
        return f"TOKENMILL_{self.key.upper()}"

    @property
    def is_list(self) -> bool:
        return self.arity in (Arity.REPEATED, Arity.MANY)
