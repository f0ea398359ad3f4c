"""Which implementation multiplies a matrix of a given shape with a given number of tokens fastest on a given card.

Sources, first hit wins: shipped entries (`linear_table.json`) that were measured on this family of cards, what
`linear_tuning` measured on this card and left in the cache directory, shipped entries that were taken over from another
family, the shipped rule. The shipped table names families of cards; measured files are one per card name.
"""

import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

MAX_PARTIALS = 1 << 23
"""Numbers in the scratch memory of the streaming kernel: two tiles of all tokens for each of its programs."""

_MOST_MULTIPROCESSORS = 256
_RANGES = ((8, 256), (16, 2048), (1, 8), (1, 16), (1, 16), (0, 64), (0, 64))
"""Least and most of each number of a `StreamConfig`."""
_PREFETCH_ELEMENTS = 8
"""The least that a thread may ask for: 16 bytes."""

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
        self._settled = self._shipped if shipped["measured"] else {}
        self._rules = _parsed(shipped["rules"])
        name = re.sub(r"[^A-Za-z0-9]+", "-", card)
        self._path = None if directory is None else directory / f"linears-{name}.json"
        self._measured = self._read()

    def is_known(self, problem: Problem, block_t: int) -> bool:
        """Whether a measurement stands behind the choice."""
        key = problem.key(block_t)
        return key in self._settled or key in self._measured

    def choose(self, problem: Problem, block_t: int) -> StreamConfig | None:
        """Tiles for up to `block_t` tokens, None for the library."""
        key = problem.key(block_t)
        for entries in (self._settled, self._measured, self._shipped):
            if key in entries:
                return entries[key]
        return self._rules[f"{problem.kind} {block_t}"]

    def candidates(self, problem: Problem, block_t: int) -> list[StreamConfig]:
        """Tiles worth a try for a shape that is not known, likely ones first: what was taken over for the shape, the
        rule, what serves other shapes."""
        others = [config for key, config in self._shipped.items() if key.split()[::2] == [problem.kind, str(block_t)]]
        likely = [self._shipped.get(problem.key(block_t)), self._rules[f"{problem.kind} {block_t}"]]
        return [config for config in dict.fromkeys([*likely, *others]) if config is not None]

    def remember(self, measured: Entries) -> None:
        """Adds measurements, for this process and, in the file, for later ones. What other processes left there in
        the meantime stays, and is known here from now on."""
        self._measured |= measured
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self._path.with_suffix(".lock")):
                self._measured = self._read() | self._measured
                self._write()
        except OSError as error:
            logger.warning("Measured matrix kernels cannot be kept for the next start: %s", error)

    def _write(self) -> None:
        """Readers find the file as it was or as it will be, never half of it."""
        assert self._path is not None
        raw = {key: None if config is None else astuple(config) for key, config in self._measured.items()}
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, prefix="linears-", delete=False) as file:
            json.dump(raw, file, indent=0)
        os.replace(file.name, self._path)

    def _read(self) -> dict[str, StreamConfig | None]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            return _parsed(json.loads(self._path.read_text()))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is not used, matrix kernels are measured again: %s", self._path, error)
            return {}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time. Raises OSError if there is no such file and none can be made."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _parsed(raw: Mapping[str, list[int] | None]) -> dict[str, StreamConfig | None]:
    """Raises ValueError, TypeError or AttributeError if that is no table, or one that no kernel could be run with."""
    return {key: None if numbers is None else _checked(StreamConfig(*numbers), key) for key, numbers in raw.items()}


def _checked(config: StreamConfig, key: str) -> StreamConfig:
    """`config`, if the kernel stays within its memory with it on any card. Raises ValueError."""
    numbers, block_t = astuple(config), int(key.split()[-1])
    if block_t not in TOKEN_BLOCKS:
        raise ValueError(f"{key}: no kernel is compiled for {block_t} tokens")
    for number, (low, high) in zip(numbers, _RANGES, strict=True):
        if type(number) is not int or not low <= number <= high:
            raise ValueError(f"{key}: {number} is no whole number from {low} to {high}")
    if any(number & (number - 1) for number in (config.block_n, config.block_k, config.num_warps)):
        raise ValueError(f"{key}: tiles and warps of {numbers} must be powers of 2")
    if config.block_n * config.block_k < config.num_warps * 32 * _PREFETCH_ELEMENTS:
        raise ValueError(f"{key}: tiles of {numbers} are too small for their warps")
    if 2 * _MOST_MULTIPROCESSORS * config.programs_per_sm * config.block_n * block_t > MAX_PARTIALS:
        raise ValueError(f"{key}: {numbers} need too much scratch memory")
    return config


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
