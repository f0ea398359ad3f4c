"""What the load generator sends beside plain random prompts: conversations and prompts from files, prompts that share
prefixes, and recorded traces. Knows nothing of servers or of flags.

Equal seeds give equal requests on every machine.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.workload import Prompt, fit_texts, printable_ids

_MIN_TOKENS, _MAX_PROMPT_TOKENS, _MAX_TOTAL_TOKENS = 4, 1024, 2048
"""Conversations outside of these are left out, as by the known serving benchmark."""


class PromptMaker:
    """Turns token ids and texts into prompts of the wanted format."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None, *, as_ids: bool) -> None:
        """`vocab_size` is for ids without a tokenizer."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        if tokenizer is not None and not as_ids:
            self._usable = printable_ids(tokenizer)
        else:
            size = vocab_size or (0 if tokenizer is None else tokenizer.get_vocab_size(with_added_tokens=False))
            self._usable = np.arange(size // 50, size)  # special tokens usually come first

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        """Random token ids."""
        ids: list[int] = rng.choice(self._usable, size=count).tolist()
        return ids

    def from_ids(self, ids: list[list[int]], output_lens: Sequence[int], rng: np.random.Generator) -> list[Prompt]:
        """Prompts of exactly these lengths. Texts may have other tokens near their ends, where random ones merge."""
        if self._as_ids or self._tokenizer is None:
            return [Prompt(each, len(each), output_len) for each, output_len in zip(ids, output_lens, strict=True)]
        special = self._tokenizer.num_special_tokens_to_add(False)
        targets = [max(1, len(each) - special) for each in ids]
        starts = [each[:target] for each, target in zip(ids, targets, strict=True)]
        texts, lengths = fit_texts(starts, targets, self._usable, self._tokenizer, rng)
        return [
            Prompt(text, length + special, output_len)
            for text, length, output_len in zip(texts, lengths, output_lens, strict=True)
        ]

    def from_text(self, text: str, output_len: int) -> Prompt:
        """Raises ConfigError without a tokenizer."""
        if self._tokenizer is None:
            raise ConfigError("texts of a dataset are counted in tokens: leave --vocab-size out")
        ids = self._tokenizer.encode(text).ids
        return Prompt(ids if self._as_ids else text, len(ids), output_len)

    def count(self, text: str) -> int:
        """Tokens of an answer."""
        return 0 if self._tokenizer is None else len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Dataset(Protocol):
    """Requests of a kind."""

    def prompts(self, count: int, maker: PromptMaker, seed: int) -> list[Prompt]:
        """`count` of them, or fewer if there are no more. Raises ConfigError."""


@dataclass(slots=True, frozen=True)
class Sampling:
    """How requests are chosen from a file."""

    path: Path
    shuffles: bool = True
    oversamples: bool = True
    """Whether requests are sent again if there are too few."""

    def order(self, rows: Sequence[Any], seed: int) -> list[Any]:
        chosen = list(rows)
        if self.shuffles:
            np.random.default_rng(seed).shuffle(chosen)
        return chosen

    def fill(self, prompts: list[Prompt], count: int) -> list[Prompt]:
        """Raises ConfigError if there are none."""
        if not prompts:
            raise ConfigError(f"{self.path} has no requests of use")
        if self.oversamples and len(prompts) < count:
            return (prompts * math.ceil(count / len(prompts)))[:count]
        return prompts


@dataclass(slots=True, frozen=True)
class ShareGpt:
    """The first question of each conversation of a ShareGPT file, and an answer as long as the one there."""

    sampling: Sampling
    output_len: int | None = None
    """Instead of the length of the answer."""

    def prompts(self, count: int, maker: PromptMaker, seed: int) -> list[Prompt]:
        rows = _read_json(self.sampling.path)
        if not isinstance(rows, list):
            raise ConfigError(f"{self.sampling.path} is no list of conversations, as ShareGPT files are")
        found: list[Prompt] = []
        for row in self.sampling.order(rows, seed):
            if len(found) == count:
                break
            turns = row.get("conversations") if isinstance(row, dict) else None
            if isinstance(turns, list) and len(turns) >= 2:
                prompt = self._prompt(turns, maker)
                if prompt is not None:
                    found.append(prompt)
        return self.sampling.fill(found, count)

    def _prompt(self, turns: Sequence[Any], maker: PromptMaker) -> Prompt | None:
        try:
            question, answer = str(turns[0]["value"]), str(turns[1]["value"])
        except (KeyError, TypeError):
            raise ConfigError(f"{self.sampling.path} has a turn without a value: {str(turns)[:100]}") from None
        prompt = maker.from_text(question, self.output_len or maker.count(answer))
        is_long_enough = prompt.num_tokens >= _MIN_TOKENS and (
            self.output_len is not None or prompt.output_len >= _MIN_TOKENS
        )
        total = prompt.num_tokens + prompt.output_len
        fits = prompt.num_tokens <= _MAX_PROMPT_TOKENS and total <= _MAX_TOTAL_TOKENS
        return prompt if is_long_enough and fits else None


@dataclass(slots=True, frozen=True)
class Custom:
    """Lines `{"prompt": TEXT, "output_tokens": N}`."""

    sampling: Sampling
    output_len: int | None = 256
    """None: that of each line."""

    def prompts(self, count: int, maker: PromptMaker, seed: int) -> list[Prompt]:
        rows = self.sampling.order(list(_read_lines(self.sampling.path)), seed)[:count]
        return self.sampling.fill([self._prompt(row, maker) for row in rows], count)

    def _prompt(self, row: tuple[int, Mapping[str, Any]], maker: PromptMaker) -> Prompt:
        number, fields = row
        text = fields.get("prompt")
        if not isinstance(text, str):
            raise ConfigError(f"line {number} of {self.sampling.path} has no text as prompt")
        output_len = fields.get("output_tokens") if self.output_len is None else self.output_len
        if not _is_count(output_len):
            raise ConfigError(
                f"line {number} of {self.sampling.path} has no whole number as output_tokens, which "
                "--custom-output-len -1 asks for"
            )
        return maker.from_text(text, int(output_len or 1))


@dataclass(slots=True, frozen=True)
class PrefixRepetition:
    """Prompts that begin with one of a few random prefixes, each as often."""

    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    output_len: int = 128
    shuffles: bool = True

    def prompts(self, count: int, maker: PromptMaker, seed: int) -> list[Prompt]:
        if count < self.num_prefixes:
            raise ConfigError(
                f"--num-prompts {count} is less than --prefix-repetition-num-prefixes {self.num_prefixes}"
            )
        rng = np.random.default_rng(seed)
        prefixes = [maker.draw(self.prefix_len, rng) for _ in range(self.num_prefixes)]
        per_prefix = math.ceil(count / self.num_prefixes)
        chosen = [index // per_prefix for index in range(per_prefix * self.num_prefixes)]
        if self.shuffles:
            rng.shuffle(chosen)
        ids = [prefixes[index] + maker.draw(self.suffix_len, rng) for index in chosen[:count]]
        return maker.from_ids(ids, [self.output_len] * count, rng)


@dataclass(slots=True, frozen=True)
class TraceLabels:
    """Names of fields in the lines of a trace."""

    timestamp: str = "timestamp"
    input_length: str = "input_length"
    output_length: str = "output_length"
    hash_ids: str = "hash_ids"


@dataclass(slots=True, frozen=True)
class TimedTrace:
    """Lines of a recorded trace, such as Mooncake's: when a request came, its lengths, and names of its blocks of
    tokens. Blocks of one name are equal, so that prefixes recur as they did."""

    path: Path
    block_len: int = 16
    """Tokens that a name stands for."""
    seconds_per_unit: float = 1.0
    """Of timestamps."""
    labels: TraceLabels = TraceLabels()

    def prompts(self, count: int, maker: PromptMaker, seed: int) -> list[Prompt]:
        """In the order of their times, which count from the first."""
        rows = sorted((self._row(number, fields) for number, fields in _read_lines(self.path)), key=lambda row: row[0])
        rows = rows[:count]
        if not rows:
            raise ConfigError(f"{self.path} has no requests of use")
        rng = np.random.default_rng(seed)
        blocks: dict[int, list[int]] = {}
        ids = []
        for _, input_len, _, names in rows:
            for name in names:
                if name not in blocks:
                    blocks[name] = maker.draw(self.block_len, np.random.default_rng((seed, abs(name), name < 0)))
            named = [token_id for name in names for token_id in blocks[name]][:input_len]
            ids.append(named + maker.draw(input_len - len(named), rng))
        prompts = maker.from_ids(ids, [row[2] for row in rows], rng)
        first = rows[0][0]
        return [
            replace(prompt, offset_s=(row[0] - first) * self.seconds_per_unit)
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def _row(self, number: int, fields: Mapping[str, Any]) -> tuple[float, int, int, list[int]]:
        """(timestamp, input length, output length, names of blocks). Raises ConfigError."""
        labels = self.labels
        time, names = fields.get(labels.timestamp), fields.get(labels.hash_ids, [])
        lengths = [fields.get(label) for label in (labels.input_length, labels.output_length)]
        if not isinstance(time, int | float) or not math.isfinite(time):
            raise self._error(number, labels.timestamp, time, "timestamp")
        for length, label, flag in zip(
            lengths, (labels.input_length, labels.output_length), ("input-length", "output-length"), strict=True
        ):
            if not _is_count(length):
                raise self._error(number, label, length, flag)
        if not isinstance(names, list) or not all(isinstance(name, int) for name in names):
            raise self._error(number, labels.hash_ids, names, "hash-ids")
        input_len, output_len = (int(length or 1) for length in lengths)
        if names and not -self.block_len < len(names) * self.block_len - input_len < self.block_len:
            raise ConfigError(
                f"line {number} of {self.path} has {len(names)} {labels.hash_ids} for {input_len} tokens: "
                f"--timed-trace-chunk-hash-size {self.block_len} is not that of the trace"
            )
        return float(time), input_len, output_len, names

    def _error(self, number: int, label: str, value: object, flag: str) -> ConfigError:
        return ConfigError(
            f"line {number} of {self.path} has {str(value)[:50]} as {label}; --timed-trace-label-{flag} names another "
            "field"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 1


def _read_json(path: Path) -> Any:
    """Raises ConfigError."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def _read_lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Numbers and objects of the lines that are not empty. Raises ConfigError."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"line {number} of {path} is no JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"line {number} of {path} is no JSON object")
        yield number, fields
