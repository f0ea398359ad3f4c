"""The `tokenmill` command: what its process needs before anything else. Until the signals are seen to, whoever presses
Ctrl-C gets a traceback; so this module imports next to nothing, and everything else comes later."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (without the program's name); returns the exit status. None: that of this process, whose
    signals and standard streams are then seen to as well.

    A deliberate error ends as one line on standard error and status 1.
    """
    if arguments is None:
        return _own_process(sys.argv[1:] or ["--help"])
    from tokenmill_server.cli.commands import run

    return run(arguments)


def serve() -> int:
    """The `serve` script."""
    return _own_process(["serve", *sys.argv[1:]])


def _own_process(arguments: Sequence[str]) -> int:
    """Runs the command line in a process that has nothing else to do."""
    if arguments[0] == "serve":
        _end_quietly_on_signals()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            # The interpreter would fail to flush it at exit, and end with a status of its own.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _run(arguments: Sequence[str]) -> int:
    _open_standard_streams()
    from tokenmill_engine.ipc.bytecode import keep_bytecode
    from tokenmill_server.cli.commands import COMMANDS, run

    if arguments[0] in COMMANDS:
        keep_bytecode()
    return run(arguments)


def _end_quietly_on_signals() -> None:
    """Whoever stops a server before it has begun gets no traceback. The launcher's own handlers come later."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    """With the status that shells give to a process which the signal itself has ended."""
    os._exit(128 + number)


def _open_standard_streams() -> None:
    """Streams that were closed when the process began lead nowhere."""
    from tokenmill_engine.ipc.child import open_standard_descriptors

    open_standard_descriptors()
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
