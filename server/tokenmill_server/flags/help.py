"""Text of `tokenmill serve --help`, grouped, whole or for one heading or word."""

import shutil
import textwrap
from collections.abc import Iterable

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.flag import Arity, Flag, Group
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED, UnsupportedFlag

_USAGE = """\
usage: tokenmill serve [MODEL] [flags]

Serves a model over an OpenAI-compatible HTTP API. Without MODEL: SmolLM2-135M-Instruct.
Flags take `-` or `_`; sizes take suffixes (32k = 32000, 32K = 32768); switches have `--no-` twins."""

_CONFIG = ("--config FILE", "YAML file with flag names as keys; the command line wins over it, it wins over defaults")
_INDENT = 30


def help_text(topic: str | None = None) -> str:
    """The text for `--help` (None), `--help=all`, `--help=<heading>` or `--help=<word>`.

    Raises:
        ConfigError: nothing matches the topic.
    """
    if topic is None or topic.lower() == "all":
        parts = [_USAGE, *(_section(group, _of_group(group)) for group in Group)]
        parts.append(_environment_note() if topic is None else _environment_list())
        if topic is not None:
            parts.append(_unsupported_list())
        return "\n\n".join(parts)
    heading = next((group for group in Group if group.lower() == topic.lower().removesuffix("config")), None)
    if heading is not None:
        return _section(heading, _of_group(heading))
    word = topic.lstrip("-").replace("_", "-").lower()
    found = [flag for flag in FLAGS.values() if _mentions(flag, word)]
    unsupported = [row for row in UNSUPPORTED.values() if _names(row, word)]
    if not found and not unsupported:
        groups = ", ".join(Group)
        raise ConfigError(f"no flag mentions {topic!r}; try --help=all or one of the headings {groups}")
    parts = [_section(f"Flags about {topic!r}", found)] if found else []
    if unsupported:
        parts.append(_section_of_unsupported(f"Flags about {topic!r} that are not supported yet", unsupported))
    return "\n\n".join(parts)


def _of_group(group: Group) -> list[Flag]:
    return [flag for flag in FLAGS.values() if flag.group is group]


def _mentions(flag: Flag, word: str) -> bool:
    return word in flag.name or word in flag.help.lower() or word in (short.lstrip("-") for short in flag.short)


def _names(row: UnsupportedFlag, word: str) -> bool:
    return word in row.name or word in (short.lstrip("-") for short in row.short)


def _section_of_unsupported(title: str, rows: Iterable[UnsupportedFlag]) -> str:
    lines = [_row(", ".join([f"--{row.name}", *row.short]), _right_of_unsupported(row)) for row in rows]
    return "\n".join([f"{title}:", *lines])


def _right_of_unsupported(row: UnsupportedFlag) -> str:
    if row.notice:
        return f"Accepted, without effect: {row.notice}"
    neutral = " or ".join(sorted(row.neutral - {""}))
    text = f"Accepted only as {neutral}" if neutral else "Refused"
    return f"{text}; {row.remark}" if row.remark else text


def _section(title: str, flags: Iterable[Flag]) -> str:
    rows = [_CONFIG] if title == Group.FRONTEND else []
    rows += [(_left(flag), _right(flag)) for flag in flags]
    return "\n".join([f"{title}:", *(_row(left, right) for left, right in rows)])


def _left(flag: Flag) -> str:
    if flag.arity is Arity.SWITCH:
        return f"--{flag.name}, --no-{flag.name}"
    names = ", ".join([f"--{flag.name}", *flag.short])
    return f"{names} {flag.metavar}{' ...' if flag.arity is Arity.MANY else ''}"


def _right(flag: Flag) -> str:
    if flag.default in (None, ()) or "Default:" in flag.help:
        return flag.help
    default = ",".join(flag.default) if isinstance(flag.default, tuple) else flag.default
    if isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, float):
        default = f"{default:g}"
    return f"{flag.help} [{default}]"


def _row(left: str, right: str) -> str:
    width = max(60, min(shutil.get_terminal_size().columns, 120))
    lines = textwrap.wrap(right, width - _INDENT)
    head = f"  {left}"
    if len(head) > _INDENT - 2:
        lines.insert(0, head)
    else:
        lines[0] = head.ljust(_INDENT) + lines[0]
    return "\n".join([lines[0], *(" " * _INDENT + line for line in lines[1:])])


def _environment_note() -> str:
    return (
        "Every flag can also be set by a variable, for example TOKENMILL_PORT for --port.\n"
        "More: --help all, --help and a heading from above (--help cache), or any word (--help tokenizer)."
    )


def _environment_list() -> str:
    rows = [(flag.environment_variable, flag) for flag in FLAGS.values()]
    lines = [", ".join([name, *(alias.name for alias in flag.env)]) for name, flag in rows]
    return "Environment variables (weaker than the command line and --config):\n" + "\n".join(f"  {x}" for x in lines)


def _unsupported_list() -> str:
    names = ", ".join(f"--{row.name}" for row in UNSUPPORTED.values())
    return "Flags of vLLM that are recognised but not supported yet:\n" + textwrap.fill(
        names, 110, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
