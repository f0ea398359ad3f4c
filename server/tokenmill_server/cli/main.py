"""The `tokenmill` command. Each subcommand imports what it needs, when it is called: `--version` and `--help` and
every mistake on the command line answer at once."""

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
  serve    serve a model over an OpenAI-compatible HTTP API
  chat     talk to a running server
  bench    measure a server (serve) or the engine (throughput, latency)

`tokenmill COMMAND --help` says more; `tokenmill --version` prints the version.
"""

_COMMANDS = {
    "serve": "tokenmill_server.cli.serve",
    "chat": "tokenmill_server.cli.chat",
    "bench": "tokenmill_server.bench.cli",
}
"""Command -> module whose `main(arguments)` runs it and returns the exit status."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (without the program's name); returns the exit status.

    A deliberate error ends as one line on standard error and status 1.
    """
    command, *rest = arguments if arguments is not None else sys.argv[1:] or ["--help"]
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


def serve() -> int:
    """The `serve` script."""
    return main(["serve", *sys.argv[1:]])


def _fail(message: str, status: int = 1) -> int:
    sys.stderr.write(f"tokenmill: error: {' '.join(message.split())}\n")
    return status
