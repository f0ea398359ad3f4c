"""The flags of the datasets that are no plain random prompts, named as in the known serving benchmark."""

import argparse
import math
from pathlib import Path
from typing import Any

from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.datasets import (
    Custom,
    Dataset,
    PrefixRepetition,
    Sampling,
    ShareGpt,
    TimedTrace,
    TraceLabels,
)
from tokenmill_server.bench.values import checked, count, positive, positive_number

DATASETS = ("sharegpt", "custom", "prefix_repetition", "timed_trace")

_OWN_FLAGS = {
    "sharegpt_": "sharegpt",
    "custom_": "custom",
    "prefix_repetition_": "prefix_repetition",
    "timed_trace_": "timed_trace",
}
"""How the names of flags begin that only one dataset takes."""
_FROM_FILES = ("sharegpt", "custom", "timed_trace")

_own_length = checked(int, lambda value: value >= 1 or value == -1, "a whole number, at least 1, or -1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defaults are None: what is given for another dataset is an error."""
    group = parser.add_argument_group("datasets (--dataset-name sharegpt, custom, prefix_repetition or timed_trace)")
    add = group.add_argument
    add("--dataset-path", type=Path, metavar="FILE", help="sharegpt: JSON; custom, timed_trace: JSON lines")
    add("--disable-shuffle", action="store_true", help="requests in the order of the file, or of the prefixes")
    add("--no-oversample", action="store_true", help="fewer requests than --num-prompts if the file has no more")
    add("--sharegpt-output-len", type=positive, metavar="TOKENS", help="default: as long as each answer in the file")
    add(
        "--custom-output-len",
        type=_own_length,
        metavar="TOKENS",
        help="-1: the line's output_tokens; lines are {prompt, output_tokens}. Default: 256",
    )
    add(
        "--custom-skip-chat-template",
        "--skip-chat-template",
        action="store_true",
        default=None,
        help="as it is always: prompts are sent as they are; the server has the template, for --backend openai-chat",
    )
    add("--prefix-repetition-prefix-len", type=count, metavar="TOKENS", help="default: 256")
    add("--prefix-repetition-suffix-len", type=count, metavar="TOKENS", help="default: 256")
    add("--prefix-repetition-num-prefixes", type=positive, metavar="N", help="default: 10")
    add("--prefix-repetition-output-len", type=positive, metavar="TOKENS", help="default: 128")
    add(
        "--self-timed",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="send requests of a timed_trace at its times, and not at --request-rate",
    )
    add("--timed-trace-chunk-hash-size", type=positive, metavar="TOKENS", help="of one hash id; default: 16")
    add("--timed-trace-sec-multiplier", type=positive_number, metavar="S", help="seconds per unit of time; default: 1")
    for label in ("timestamp", "input-length", "output-length", "hash-ids"):
        field = label.replace("-", "_")
        add(f"--timed-trace-label-{label}", metavar="NAME", help=f"field of a line; default: {field}")


def dataset_of(options: argparse.Namespace) -> Dataset | None:
    """None: random prompts. Raises ConfigError."""
    name: str = options.dataset_name
    for key, value in vars(options).items():
        owner = next((dataset for prefix, dataset in _OWN_FLAGS.items() if key.startswith(prefix)), name)
        if owner != name and value is not None:
            raise ConfigError(f"--{key.replace('_', '-')} needs --dataset-name {owner}")
    path: Path | None = options.dataset_path
    if path is None and name in _FROM_FILES:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path FILE")
    if path is not None and name not in _FROM_FILES:
        raise ConfigError(f"--dataset-path needs --dataset-name {', '.join(_FROM_FILES[:-1])} or {_FROM_FILES[-1]}")
    if options.self_timed and name != "timed_trace":
        raise ConfigError("--self-timed needs --dataset-name timed_trace")
    if options.self_timed and not math.isinf(options.request_rate):
        raise ConfigError("--self-timed contradicts --request-rate: both say when to send; leave one out")
    return _dataset(name, path or Path(), options)


def _dataset(name: str, path: Path, options: argparse.Namespace) -> Dataset | None:
    sampling = Sampling(path, shuffles=not options.disable_shuffle, oversamples=not options.no_oversample)
    match name:
        case "sharegpt":
            return ShareGpt(sampling, options.sharegpt_output_len)
        case "custom":
            length = options.custom_output_len
            return Custom(sampling, 256 if length is None else None if length == -1 else length)
        case "prefix_repetition":
            return PrefixRepetition(shuffles=sampling.shuffles, **_given(options, "prefix_repetition_"))
        case "timed_trace":
            labels = TraceLabels(**_given(options, "timed_trace_label_"))
            block_len, seconds = options.timed_trace_chunk_hash_size, options.timed_trace_sec_multiplier
            return TimedTrace(path, block_len or 16, seconds or 1.0, labels)
        case _:
            return None


def _given(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """Options whose names begin so, by the rest of the name."""
    return {
        key.removeprefix(prefix): value
        for key, value in vars(options).items()
        if key.startswith(prefix) and value is not None
    }
