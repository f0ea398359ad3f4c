"""`tokenmill chat`: talk to a running server, this one or any other that speaks the OpenAI API."""

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

_COMMANDS = "/new starts over, /help lists the commands, /exit (or Ctrl-D) ends; Ctrl-C interrupts an answer"
_GREETING = f"Chatting with %s. {_COMMANDS}.\n"

Message = dict[str, str]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Raises:
        TokenmillError: an option is wrong, no server answers, or (with --quick) it refused.
    """
    options = _parse(arguments)
    client = client_of(options)
    messages = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    if options.quick is not None:
        print_pieces(_pieces(client, [*messages, _question(options.quick)]), stats=options.stats)
        return 0
    return _converse(client, messages, stats=options.stats)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tokenmill chat", description="Talk to a running server.", allow_abbrev=False)
    add_server_options(parser)
    parser.add_argument("--system-prompt", help="first message of the conversation")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask one question, print the answer and end")
    add_answer_options(parser, "as long as fits")
    return parser.parse_args(arguments)


def _converse(client: ApiClient, messages: list[Message], *, stats: bool) -> int:
    """Questions from standard input until its end; the conversation so far goes with each."""
    sys.stdout.write(_GREETING % client.model)
    said: list[Message] = []
    for question in lines_of_user({"/new": said.clear}, _COMMANDS):
        asked = _question(question)
        pieces = _pieces(client, [*messages, *said, asked])
        answer = answered(pieces, stats=stats)
        if answer is not None:
            said += [asked, {"role": "assistant", "content": answer}]
    return 0


def _question(text: str) -> Message:
    return {"role": "user", "content": text}


def _pieces(client: ApiClient, messages: Sequence[Message]) -> Iterator[str]:
    events = client.stream("/chat/completions", {"messages": list(messages)})
    return texts(events, lambda choice: choice["delta"].get("content"))
