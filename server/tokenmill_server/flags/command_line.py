"""Reads the flags of `serve` (and of the commands that start an engine) from the command line."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.dotted import join_dotted
from tokenmill_server.flags.flag import Arity, Flag
from tokenmill_server.flags.origin import POSITIONAL_MODEL, on_command_line
from tokenmill_server.flags.suggestion import suggestion
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED, UnsupportedFlag
from tokenmill_server.flags.values import (
    FlagValues,
    check_neutral,
    offer_environment,
    offer_file,
    parse_value,
)

_UNSUPPORTED_PREFIX = "unsupported:"
_JSON_FLAGS = frozenset(
    [flag.name for flag in FLAGS.values() if flag.metavar == "JSON"]
    + [row.name for row in UNSUPPORTED.values() if not row.is_switch]
)
"""Flags whose members may be flags of their own. Of unsupported ones any may be, and is refused by its name."""


class _Parser(argparse.ArgumentParser):
    """Splits the command line; checking values is the table's job. Errors are raised, not printed."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def read_flags(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> FlagValues:
    """Values of all flags from `arguments` (the model may be the positional one), the `--config` file that they
    name, and the environment.

    Raises:
        ConfigError: an unknown flag, a wrong value, or two values that contradict each other.
    """
    parser = _build_parser()
    joined = join_dotted(arguments, _JSON_FLAGS)
    namespace, rest = parser.parse_known_args([_with_dashes(argument) for argument in joined])
    given: dict[str, list[str]] = {key: raw for key, raw in vars(namespace).items() if raw}
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        name = unknown[0].partition("=")[0]
        raise ConfigError(f"unknown flag {name}{suggestion(name, [*FLAGS, 'config'])}")

    values = FlagValues()
    _take_positional(values, rest, given)
    config_files = given.pop("config", [])
    for key, raw in given.items():
        if key.startswith(_UNSUPPORTED_PREFIX):
            key = key.removeprefix(_UNSUPPORTED_PREFIX)
            for value in raw:
                _check_unsupported(UNSUPPORTED[key], value)
        else:
            values.offer(key, _single_value(FLAGS[key], raw), on_command_line(FLAGS[key].name))
    if len(set(config_files)) > 1:
        raise ConfigError(f"--config is given {len(config_files)} times; merge the files into one")
    if config_files:
        offer_file(values, config_files[0])
    offer_environment(values, os.environ if environment is None else environment)
    return values


def _take_positional(values: FlagValues, positional: Sequence[str], given: Mapping[str, Sequence[str]]) -> None:
    if len(positional) > 1:
        remark = "; repeat --api-key for every key" if "api_key" in given else ""
        raise ConfigError(f"unexpected argument {positional[1]!r} after the model {positional[0]!r}{remark}")
    if not positional:
        return
    for model in given.get("model", []):
        if model != positional[0]:
            raise ConfigError(f"two models are named, {positional[0]} and --model {model}; leave one out")
    values.offer("model", positional[0], POSITIONAL_MODEL)


def _check_unsupported(row: UnsupportedFlag, value: str) -> None:
    if row.is_switch and value == "false" and value not in row.neutral:
        raise ConfigError(f"--no-{row.name} is not supported; {row.remark or 'leave it out'}")
    check_neutral(row.key, value, f"--{row.name}" if row.is_switch else f"--{row.name} {value}")


def _single_value(flag: Flag, raw: list[str]) -> object:
    """What a flag that may stand several times on the command line says.

    Raises:
        ConfigError: a flag with one value got two different ones.
    """
    if flag.is_list:
        return raw
    origin = on_command_line(flag.name)
    parsed = [parse_value(flag, value, origin) for value in raw]
    if any(value != parsed[0] for value in parsed):
        if flag.arity is Arity.SWITCH:
            raise ConfigError(f"both {origin} and --no-{flag.name} are given; leave one out")
        raise ConfigError(f"{origin} is given with different values ({', '.join(raw)}); keep one")
    return raw[0]


def _build_parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=None)
    parser.add_argument("--config", action="append", dest="config")
    for flag in FLAGS.values():
        if flag.arity is Arity.SWITCH:
            _add_switch(parser, flag.name, flag.short, flag.key)
        elif flag.arity is Arity.MANY:
            parser.add_argument(f"--{flag.name}", *flag.short, action="extend", nargs="+", dest=flag.key)
        else:
            parser.add_argument(f"--{flag.name}", *flag.short, action="append", dest=flag.key)
    for row in UNSUPPORTED.values():
        _add_unsupported(parser, row)
    return parser


def _add_unsupported(parser: _Parser, row: UnsupportedFlag) -> None:
    dest = _UNSUPPORTED_PREFIX + row.key
    if row.is_switch:
        _add_switch(parser, row.name, row.short, dest)
    else:
        parser.add_argument(f"--{row.name}", *row.short, action="append", dest=dest)


def _add_switch(parser: _Parser, name: str, short: Sequence[str], dest: str) -> None:
    parser.add_argument(f"--{name}", *short, action="append_const", const="true", dest=dest)
    parser.add_argument(f"--no-{name}", action="append_const", const="false", dest=dest)


def _with_dashes(argument: str) -> str:
    """`--max_num_seqs=4` is `--max-num-seqs=4`; values keep their underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value
