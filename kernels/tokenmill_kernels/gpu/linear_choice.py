"""Which implementation multiplies a matrix of a given shape with a given number of tokens fastest on a given card.

Sources, first hit wins: the shipped table (`linear_table.json`), what `linear_tuning` measured on this card and left in
the cache directory, the shipped rule. The shipped table names families of cards; measured files are one per card name.
"""

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from tokenmill_kernels.cpu.build import BuildError, cache_dir

logger = logging.getLogger(__name__)

Kind = Literal["linear", "gated", "argmax"]

TOKEN_BLOCKS = (1, 8, 16, 32, 64)
"""Numbers of tokens that the streaming kernel is compiled for; more go to the library."""

_SHIPPED = Path(__file__).with_name("linear_table.json")
_FIRST_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Tiles and pipeline of the streaming kernel."""

    block_n: int
    """Rows of the weight per tile."""
    block_k: int
    """Columns per unit, the step of the loop."""
    num_stages: int
    num_warps: int
    programs_per_sm: int
    cuts: int
    """Parts that a tile may be cut into, to give each program as much as the next; 0 for any number."""
    ahead: int
    """Units that a program asks for while the kernel before still runs."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A weight [num_rows, k_size] of 16-bit numbers, and what is done with its product."""

    kind: Kind
    num_rows: int
    k_size: int

    def key(self, block_t: int) -> str:
        """Name of its entry for up to `block_t` tokens."""
        return f"{self.kind} {self.num_rows}x{self.k_size} {block_t}"


Entries = Mapping[str, StreamConfig | None]
"""By `Problem.key`: tiles of the streaming kernel, None where the library is faster."""


def token_block(num_tokens: int) -> int:
    """The smallest of TOKEN_BLOCKS that holds `num_tokens`."""
    return next(block for block in TOKEN_BLOCKS if num_tokens <= block)


class ChoiceTable:
    """What is known about one card."""

    def __init__(self, card: str, directory: Path | None) -> None:
        """Reads the shipped table, and the measurements of `card` kept in `directory` if there are any."""
        families = json.loads(_SHIPPED.read_text())
        shipped = families[next((name for name in families if name in card), list(families)[-1])]
        self._shipped = _parsed(shipped["shapes"])
        self._rules = _parsed(shipped["rules"])
        name = re.sub(r"[^A-Za-z0-9]+", "-", card)
        self._path = None if directory is None else directory / f"linears-{name}.json"
        self._measured = self._read()

    def is_known(self, problem: Problem, block_t: int) -> bool:
        """Whether a measurement stands behind the choice."""
        key = problem.key(block_t)
        return key in self._shipped or key in self._measured

    def choose(self, problem: Problem, block_t: int) -> StreamConfig | None:
        """Tiles for up to `block_t` tokens, None for the library."""
        key = problem.key(block_t)
        for entries in (self._shipped, self._measured):
            if key in entries:
                return entries[key]
        return self._rules[f"{problem.kind} {block_t}"]

    def candidates(self, kind: Kind, block_t: int) -> list[StreamConfig]:
        """Tiles worth a try for a shape that is not known."""
        tried = [config for key, config in self._shipped.items() if key.split()[::2] == [kind, str(block_t)]]
        return [config for config in dict.fromkeys([self._rules[f"{kind} {block_t}"], *tried]) if config is not None]

    def remember(self, measured: Entries) -> None:
        """Adds measurements, for this process and, in the file, for later ones."""
        self._measured |= measured
        if self._path is None:
            return
        raw = {key: None if config is None else astuple(config) for key, config in self._measured.items()}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix="linears-", delete=False) as file:
                json.dump(raw, file, indent=0)
            os.replace(file.name, self._path)
        except OSError as error:
            logger.warning("Measured matrix kernels cannot be kept for the next start: %s", error)

    def _read(self) -> dict[str, StreamConfig | None]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return _parsed(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is not used, matrix kernels are measured again: %s", self._path, error)
            return {}


def _parsed(raw: Mapping[str, list[int] | None]) -> dict[str, StreamConfig | None]:
    return {key: None if numbers is None else StreamConfig(*numbers) for key, numbers in raw.items()}


@cache
def choice_table(device: torch.device) -> ChoiceTable:
    """The table of a CUDA device, with the user's cache directory."""
    try:
        directory = cache_dir()
    except BuildError as error:
        logger.warning("Measured matrix kernels are not kept: %s", error)
        directory = None
    return ChoiceTable(torch.cuda.get_device_name(device), directory)


@cache
def can_stream_dtype(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the streaming kernel is meant for `dtype`: 16 bits, on a card with asynchronous copies."""
    return dtype.itemsize == 2 and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
