"""The parent's side of a child process: start it with a control channel that it inherits, and see how it stands."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import psutil

from tokenmill_engine.ipc.bytecode import bytecode_environment
from tokenmill_engine.ipc.channel import ControlChannel
from tokenmill_engine.ipc.signals import outside_signals_blocked

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ChildProcess(Generic[T]):
    """A running `python -m <module>` and our end of its control channel."""

    process: subprocess.Popen[bytes]
    channel: ControlChannel[T]


def spawn_child(
    module: str,
    message_type: Any,
    *,
    args: Sequence[str] = (),
    pass_fds: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
) -> ChildProcess[T]:
    """Start `python -m module --control-fd N --parent-pid P *args`; `message_type` is what the child sends.

    `pass_fds` are inherited under their own numbers. The child gets a process group of its own, so that Ctrl-C in a
    terminal reaches the launcher alone; signals from outside that reach it all the same are blocked until it ignores
    them, in `become_child`. Call it from a thread that lives as long as the child is to: the child asks the kernel to
    be told when the *thread* that started it ends. `env` None inherits ours. Raises OSError if the machine does not
    allow one more.
    """
    open_standard_descriptors()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        # -P: a file in the user's current folder must not be taken for a module of ours or of a library.
        command = [sys.executable, "-P", "-m", module]
        ends = ["--control-fd", str(theirs.fileno()), "--parent-pid", str(os.getpid())]
        try:
            with outside_signals_blocked():
                process = subprocess.Popen(
                    [*command, *ends, *args],
                    pass_fds=(theirs.fileno(), *pass_fds),
                    env=bytecode_environment(os.environ if env is None else env),
                    stdin=subprocess.DEVNULL,
                    cwd=_usable_folder(),
                    process_group=0,
                )
        except OSError:
            ours.close()
            raise
    return ChildProcess(process, ControlChannel(ours, message_type))


def open_standard_descriptors() -> None:
    """Puts /dev/null where standard input, output or error are closed. Whatever is opened next would take such a
    number, and a child would write its log into it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _usable_folder() -> str | None:
    """None: the current one. Some libraries do not load in one that was deleted."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


def is_stopped(pid: int, *, or_traced: bool = False) -> bool:
    """Whether a process stands still by SIGSTOP or the like; `or_traced`: or because a debugger holds it."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return status == psutil.STATUS_STOPPED or (or_traced and status == psutil.STATUS_TRACING_STOP)
