"""The table of commands, and how each of them ends. A subcommand imports what it needs, when it is called: `--version`
and `--help` and every mistake on the command line answer at once."""

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import cast

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.version import __version__

_USAGE = """\
usage: tokenmill COMMAND [arguments]

commands:
  serve        serve a model over an OpenAI-compatible HTTP API
  chat         talk to a running server
  complete     let a running server go on with a text
  run-batch    answer the lines of an OpenAI batch file
  collect-env  say what this machine has, for a report of a fault
  bench        measure a server (serve), the engine (throughput, latency, scheduler) or both beside a peer (compare)

`tokenmill COMMAND --help` says more; `tokenmill --version` prints the version.
"""

COMMANDS = {
    "serve": "tokenmill_server.cli.serve",
    "chat": "tokenmill_server.cli.chat",
    "complete": "tokenmill_server.cli.complete",
    "run-batch": "tokenmill_server.cli.run_batch",
    "collect-env": "tokenmill_server.cli.collect_env",
    "bench": "tokenmill_server.bench.cli",
}
"""Command -> module whose `main(arguments)` runs it and returns the exit status."""


def run(arguments: Sequence[str]) -> int:
    """Runs the command line (without the program's name); returns the exit status.

    A deliberate error ends as one line on standard error and status 1.
    """
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
    if command not in COMMANDS:
        return _fail(f"unknown command {command!r}; commands are {', '.join(COMMANDS)}", status=2)
    try:
        run_command = cast(Callable[[list[str]], int], importlib.import_module(COMMANDS[command]).main)
        return run_command(rest)
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
