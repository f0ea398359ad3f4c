"""How the end of a child process is told."""

import signal

import pytest

from tokenmill_engine.ipc.exits import describe_exit


@pytest.mark.parametrize(
    ("returncode", "beginning"),
    [
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-40, "was ended by signal 40"),
        (-signal.SIGKILL, "was killed (SIGKILL)"),
    ],
)
def test_the_moment_of_an_end_comes_before_advice(returncode: int, beginning: str) -> None:
    plain = describe_exit(returncode)
    assert plain.startswith(beginning)
    told = describe_exit(returncode, "while it was starting")
    assert told == f"{beginning} while it was starting{plain.removeprefix(beginning)}"


def test_every_signal_can_be_told() -> None:
    assert len({describe_exit(-number) for number in range(1, signal.SIGRTMAX + 1)}) == signal.SIGRTMAX


def test_the_advice_names_the_flags_that_would_help() -> None:
    assert describe_exit(-signal.SIGKILL, savers="--a or --b").endswith("lower --a or --b")
