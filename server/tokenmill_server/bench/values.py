"""Types for the command lines of the benchmarks: each converts a word or says what it should have been."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from tokenmill_server.bench.metrics import LATENCIES

_GOALS = ("ttft", "tpot", "e2el")


def checked(convert: Callable[[str], Any], holds: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An argparse type: `convert`, then check; the message says what is `wanted`."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except (ValueError, TypeError):
            value = None
        if value is None or not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def _split_header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not (name + value).isprintable():
        raise ValueError
    return name, value


def _split_goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    return name, float(limit)


positive = checked(int, lambda value: value >= 1, "a whole number, at least 1")
count = checked(int, lambda value: value >= 0, "a whole number, at least 0")
not_negative = checked(float, lambda value: 0 <= value < math.inf, "a number, at least 0")
positive_number = checked(float, lambda value: value > 0, "a number above 0")
ratio = checked(float, lambda value: 0 <= value < 1, "a number from 0 to below 1")
header = checked(_split_header, lambda value: True, "NAME=VALUE")
json_object = checked(json.loads, lambda value: isinstance(value, dict), "a JSON object")
metric_names = checked(
    lambda text: tuple(text.split(",")),
    lambda names: set(names) <= set(LATENCIES),
    f"a comma-separated choice of {', '.join(LATENCIES)}",
)
percentiles = checked(
    lambda text: tuple(float(rank) for rank in text.split(",")),
    lambda ranks: all(0 <= rank <= 100 for rank in ranks),
    "comma-separated numbers from 0 to 100",
)
goal = checked(
    _split_goal,
    lambda goal: goal[0] in _GOALS and 0 < goal[1] < math.inf,
    f"NAME:MILLISECONDS with a name of {', '.join(_GOALS)}",
)
