"""`tokenmill serve [MODEL] [flags]`."""

import sys
from collections.abc import Sequence

from tokenmill_engine.ipc.lifecycle import set_title
from tokenmill_engine.ipc.logs import configure_logging
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.help import help_text


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
    # Not before the flags are known to be right: a mistake should not wait for these imports.
    from tokenmill_server.flags.build import build_configuration
    from tokenmill_server.launcher import serve

    configuration = build_configuration(values)
    set_title("launcher")
    return serve(configuration)
