"""A process of a comparison: started with a log, and gone with all its descendants afterwards, also if we are
killed."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.bench.death_signal import die_with_this_process

_POLL_S = 0.05
_STOP_S = 15.0
_ORPHANS_S = 1.0
"""For what is left of a side once its first process has ended, before it is killed."""
_REAP_S = 5.0
_LOG_TAIL_CHARS = 4000
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True, frozen=True)
class Program:
    """What to run, and how."""

    command: Sequence[str]
    environment: Mapping[str, str]
    death_signal: signal.Signals = signal.SIGKILL
    """It gets this if we are killed and cannot end it. For us it is one that ends the launcher at once, whose children
    see to themselves; at SIGTERM it would finish its requests first. A peer's children may need to be ended by it."""


class SideError(TokenmillError):
    """A side could not start, failed or took too long."""


class LoadError(SideError):
    """One load failed; the side can still run others."""


class Log:
    """What one process says, at the end of a file that others wrote to before."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._start = file.stat().st_size if file.exists() else 0

    def tail(self) -> str:
        """The last lines of this process."""
        if not self.file.exists():
            return ""
        with self.file.open("rb") as log:
            log.seek(self._start)
            return log.read().decode(errors="replace")[-_LOG_TAIL_CHARS:]


@contextlib.contextmanager
def running_process(program: Program, log: Log, **streams: Any) -> Iterator["subprocess.Popen[str]"]:
    """A process whose descendants, too, are gone after the block. What it says goes to `log`. Main thread only: the
    process gets its death signal when the thread ends that started it."""
    with log.file.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(program.command)}\n")
        file.flush()
        process: subprocess.Popen[str] | None = None
        try:
            with _signals_later():
                process = _start(program, {"stdin": subprocess.DEVNULL, "stdout": file, **streams}, file)
            yield process
        finally:
            if process is not None:
                _end(process)


def _start(program: Program, streams: Mapping[str, Any], errors: IO[str]) -> "subprocess.Popen[str]":
    """Raises: SideError."""
    try:
        return subprocess.Popen(
            program.command,
            env=dict(program.environment),
            stderr=errors,
            start_new_session=True,
            text=True,
            preexec_fn=die_with_this_process(program.death_signal),
            **streams,
        )
    except OSError as error:
        raise SideError(f"cannot run {program.command[0]}: {error.strerror}") from error


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """A signal that ends us and comes in this block is dealt with after it: what is started here must be known to
    those who end it. Main thread only."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda got, _frame: came.append(got)) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


def _end(process: "subprocess.Popen[str]") -> None:
    descendants: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    process.kill()
    process.wait()
    _await(descendants, _ORPHANS_S)
    # Its group may have members that were children of one that had ended already, or that began meanwhile.
    left = [each for each in {*descendants, *_group(process.pid)} if _runs(each)]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    _await(left, _REAP_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # what it did not read any more
                pipe.close()


def _group(group: int) -> list[psutil.Process]:
    """The processes of a process group."""
    members: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group:
                members.append(psutil.Process(pid))
    return members


def _runs(process: psutil.Process) -> bool:
    """Zombies do not: who has to collect them may take its time."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _await(processes: Sequence[psutil.Process], limit_s: float) -> None:
    """Waits until they have ended."""
    end_s = time.monotonic() + limit_s
    while any(map(_runs, processes)) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
