"""How the end of a child process is told."""

import signal

import pytest

from tokenmill_server.children import describe_exit


@pytest.mark.parametrize(
    ("returncode", "beginning"),
    [
        (3, "exited with status 3"),
        (-signal.SIGSEGV, "was ended by SIGSEGV"),
        (-signal.SIGKILL, "was killed (SIGKILL)"),
    ],
)
def test_the_moment_of_an_end_comes_before_advice(returncode: int, beginning: str) -> None:
    plain = describe_exit(returncode)
    assert plain.startswith(beginning)
    told = describe_exit(returncode, "while it was starting")
    assert told == f"{beginning} while it was starting{plain.removeprefix(beginning)}"
