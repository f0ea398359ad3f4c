"""`tokenmill complete`: let a running server go on with a text, this one or any other that speaks the OpenAI API."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from tokenmill_server.cli.api_client import (
    ApiClient,
    add_answer_options,
    add_server_options,
    answered,
    client_of,
    lines_of_user,
    print_pieces,
    texts,
)

_COMMANDS = "/help lists the commands, /exit (or Ctrl-D) ends; Ctrl-C interrupts an answer"
_GREETING = f"%s goes on with each line that you write. {_COMMANDS}.\n"


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Raises:
        TokenmillError: an option is wrong, no server answers, or (with --quick) it refused.
    """
    options = _parse(arguments)
    client = client_of(options)
    if options.quick is not None:
        print_pieces(_pieces(client, options.quick), stats=options.stats)
        return 0
    sys.stdout.write(_GREETING % client.model)
    for prompt in lines_of_user({}, _COMMANDS):
        pieces = _pieces(client, prompt)
        answered(pieces, stats=options.stats)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "tokenmill complete", description="Let a running server go on with a text.", allow_abbrev=False
    )
    add_server_options(parser)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="complete one text, print the rest of it and end")
    add_answer_options(parser, "the server's default")
    return parser.parse_args(arguments)


def _pieces(client: ApiClient, prompt: str) -> Iterator[str]:
    return texts(client.stream("/completions", {"prompt": prompt}), lambda choice: choice.get("text"))
