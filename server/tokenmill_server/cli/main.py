"""The `tokenmill` command. Each subcommand imports what it needs, when it is called: `--version` and `--help` and
every mistake on the command line answer at once."""

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn, cast

from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.ipc.bytecode import keep_bytecode
from tokenmill_server.version import __version__

_USAGE = """\
usage: tokenmill COMMAND [arguments]

commands:
  serve    serve a model over an OpenAI-compatible HTTP API
  chat     talk to a running server
  bench    measure a server (serve), the engine (throughput, latency, scheduler) or both beside a peer (compare)

`tokenmill COMMAND --help` says more; `tokenmill --version` prints the version.
"""

_COMMANDS = {
    "serve": "tokenmill_server.cli.serve",
    "chat": "tokenmill_server.cli.chat",
    "bench": "tokenmill_server.bench.cli",
}
"""Command -> module whose `main(arguments)` runs it and returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (without the program's name); returns the exit status. None: that of this process, whose
    signals and standard streams are then seen to as well.

    A deliberate error ends as one line on standard error and status 1.
    """
    if arguments is None:
        return _own_process(sys.argv[1:] or ["--help"])
    for argument in arguments:
        if not _is_utf8(argument):
            return _fail(f"the argument {os.fsencode(argument)!r} is not valid UTF-8")
    command, *rest = arguments
    if command in ("--help", "-h", "help"):
        sys.stdout.write(_USAGE)
        return 0
    if command in ("--version", "-v", "version"):
        sys.stdout.write(f"tokenmill {__version__}\n")
        return 0
    if command not in _COMMANDS:
        return _fail(f"unknown command {command!r}; commands are {', '.join(_COMMANDS)}", status=2)
    try:
        run = cast(Callable[[list[str]], int], importlib.import_module(_COMMANDS[command]).main)
        return run(rest)
    except TokenmillError as error:
        return _fail(error.message)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return _fail("too many open files: raise `ulimit -n`")


def serve() -> int:
    """The `serve` script."""
    return _own_process(["serve", *sys.argv[1:]])


def _own_process(arguments: Sequence[str]) -> int:
    """Runs the command line in a process that has nothing else to do."""
    if arguments[0] == "serve":
        _end_quietly_on_signals()
    _open_standard_streams()
    if arguments[0] in _COMMANDS:
        keep_bytecode()
    try:
        return main(arguments)
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            # The interpreter would fail to flush it at exit, and end with a status of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _end_quietly_on_signals() -> None:
    """Whoever stops a server before it has begun gets no traceback. The launcher's own handlers come later."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    os._exit(0)


def _open_standard_streams() -> None:
    """Streams that were closed when the process began lead nowhere."""
    from tokenmill_engine.ipc.child import open_standard_descriptors

    open_standard_descriptors()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fail(message: str, status: int = 1) -> int:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"tokenmill: error: {' '.join(message.split())}\n")
    return status
