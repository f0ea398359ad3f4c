"""`tokenmill serve [MODEL] [flags]`."""

import resource
import sys
from collections.abc import Sequence

from tokenmill_engine.errors import StartupError
from tokenmill_engine.ipc.lifecycle import set_title
from tokenmill_engine.ipc.logs import configure_logging
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.data_parallel import resolve_data_parallel
from tokenmill_server.flags.help import help_text

_MIN_OPEN_FILES = 128
"""For a process of ours, with some connections."""
_OPEN_FILES = 65536


def main(arguments: Sequence[str]) -> int:
    """Serves until stopped, or prints help; returns the exit status.

    Raises:
        TokenmillError: the flags are wrong, or the server could not start or died.
    """
    for index, argument in enumerate(arguments):
        if argument in ("-h", "--help") or argument.startswith("--help="):
            following = next((word for word in arguments[index + 1 : index + 2] if not word.startswith("-")), None)
            sys.stdout.write(help_text(argument.partition("=")[2] or following) + "\n")
            return 0
    configure_logging("INFO", "launcher")
    values = read_flags(arguments)
    configure_logging(values["log_level"], "launcher")
    _check_open_files()
    parallel = resolve_data_parallel(values)
    # Not before the flags are known to be right: a mistake should not wait for these imports.
    if parallel.headless:
        from tokenmill_server.data_parallel.headless import serve_headless

        set_title("headless launcher")
        return serve_headless(values, parallel)
    from tokenmill_server.launcher import serve

    set_title("launcher")
    return serve(values, parallel)


def _check_open_files() -> None:
    """Every connection is an open file: the limit for this process and its children becomes as high as is allowed.

    Raises:
        StartupError: it is too low, and libraries would abort.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < _MIN_OPEN_FILES:
        raise StartupError(f"too many open files: only {allowed} are allowed; raise `ulimit -n` to 1024 or more")
