"""`tokenmill chat`: talk to a running server, this one or any other that speaks the OpenAI API."""

import argparse
import http.client
import json
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill_engine.errors import ConfigError, EngineError, RequestError, TokenmillError

_CONNECT_TIMEOUT_S = 600.0
_KEY_VARIABLES = ("TOKENMILL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)
"""Whatever may happen on a connection; timeouts and urllib's own errors are OSErrors."""
_COMMANDS = "/new starts over, /help lists the commands, /exit (or Ctrl-D) ends; Ctrl-C interrupts an answer"
_GREETING = f"Chatting with %s. {_COMMANDS}.\n"
_COMMAND = re.compile(r"/\w*(\s|$)")
"""How a line begins that is no question; a path is one."""

Message = dict[str, str]


@dataclass(slots=True)
class ChatClient:
    """A conversation's view of one server. `url` ends in /v1."""

    url: str
    model: str
    api_key: str | None
    options: dict[str, Any] = field(default_factory=dict)
    """Sampling fields of every request."""

    def stream(self, messages: Sequence[Message]) -> Iterator[str]:
        """Pieces of the answer as they arrive.

        Raises:
            TokenmillError: the server refused or failed.
        """
        body = {"model": self.model, "messages": list(messages), "stream": True, **self.options}
        with _open(f"{self.url}/chat/completions", self.api_key, body) as response:
            for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    return
                yield from _pieces(data)
        raise EngineError("the server closed the stream before its end")


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status.

    Raises:
        TokenmillError: an option is wrong, no server answers, or (with --quick) it refused.
    """
    options = _parse(arguments)
    if options.quick is not None and not options.quick.strip():
        raise ConfigError("--quick needs a question, got an empty text")
    url = _base_url(options)
    api_key = options.api_key or next(filter(None, map(os.environ.get, _KEY_VARIABLES)), None)
    model = options.model_name or _first_model(url, api_key)
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    client = ChatClient(url, model, api_key, {key: value for key, value in sampling.items() if value is not None})
    messages = [{"role": "system", "content": options.system_prompt}] if options.system_prompt else []
    if options.quick is not None:
        _answer(client, [*messages, {"role": "user", "content": options.quick}], stats=options.stats)
        return 0
    return _converse(client, messages, stats=options.stats)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tokenmill chat", description="Talk to a running server.", allow_abbrev=False)
    parser.add_argument("--url", help="base URL; http:// and /v1 may be left out [http://HOST:PORT/v1]")
    parser.add_argument("--host", help="the server's address [127.0.0.1]")
    parser.add_argument("--port", type=int, help="the server's port [8000]")
    parser.add_argument("--model-name", help="model to ask for [the first one that the server lists]")
    parser.add_argument("--api-key", help=f"[{' or '.join(_KEY_VARIABLES)}]")
    parser.add_argument("--system-prompt", help="first message of the conversation")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="ask one question, print the answer and end")
    parser.add_argument("--max-tokens", type=int, help="longest answer [as long as fits]")
    parser.add_argument("--temperature", type=float, help="randomness [the server's default]")
    parser.add_argument("--stats", action="store_true", help="print the time to the first piece and the rate")
    return parser.parse_args(arguments)


def _base_url(options: argparse.Namespace) -> str:
    """The URL that ends in /v1, or whatever path the user wrote.

    Raises:
        ConfigError: --url together with --host or --port.
    """
    if options.url is None:
        host = options.host or "127.0.0.1"
        return f"http://{f'[{host}]' if ':' in host else host}:{8000 if options.port is None else options.port}/v1"
    if options.host is not None or options.port is not None:
        raise ConfigError("--url contradicts --host and --port: it names both; leave one or the other out")
    url: str = options.url.strip().rstrip("/")
    if "://" not in url:
        url = f"http://{url}"
    return url if urllib.parse.urlsplit(url).path else f"{url}/v1"


def _converse(client: ChatClient, messages: list[Message], *, stats: bool) -> int:
    """Questions from standard input until its end; the conversation so far goes with each."""
    import readline  # noqa: F401  (line editing and history for input())

    sys.stdout.write(_GREETING % client.model)
    opening = list(messages)
    while True:
        try:
            question = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return 0
        if _COMMAND.match(question):
            command = question.strip()
            if command == "/exit":
                return 0
            if command == "/new":
                messages = list(opening)
            else:
                refusal = "" if command == "/help" else f"there is no {command}; a question may begin with a space. "
                sys.stdout.write(f"{refusal}{_COMMANDS}\n")
            continue
        if not question.strip():
            continue
        asked: list[Message] = [*messages, {"role": "user", "content": question}]
        try:
            answer = _answer(client, asked, stats=stats)
        except TokenmillError as error:
            sys.stderr.write(f"error: {error.message}\n")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        else:
            messages = [*asked, {"role": "assistant", "content": answer}]


def _answer(client: ChatClient, messages: Sequence[Message], *, stats: bool) -> str:
    """Prints the answer while it arrives; returns it whole."""
    started = time.monotonic()
    first: float | None = None
    pieces: list[str] = []
    for piece in client.stream(messages):
        if piece:
            first = first or time.monotonic()
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    if stats and first is not None:
        rate = (len(pieces) - 1) / max(time.monotonic() - first, 1e-9)
        sys.stderr.write(f"first piece after {first - started:.3f} s, then {rate:.1f} pieces/s\n")
    return "".join(pieces)


def _lines(response: Any) -> Iterator[bytes]:
    """Lines of an answer. Raises EngineError if the connection breaks."""
    while True:
        try:
            line: bytes = response.readline()
        except _CONNECTION_ERRORS as error:
            raise EngineError(f"the connection broke in the middle of the answer ({_reason(error)})") from None
        if not line:
            return
        yield line


def _pieces(data: bytes) -> list[str]:
    """Text of one event. Raises EngineError for one that tells of an error, or is none of this API."""
    try:
        chunk = json.loads(data)
        if "error" in chunk:
            raise EngineError(str(chunk["error"]["message"]))
        return [choice["delta"].get("content") or "" for choice in chunk["choices"]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise EngineError(f"the server sent what is no part of an answer: {data[:100]!r}") from None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def _first_model(url: str, api_key: str | None) -> str:
    try:
        with _open(f"{url}/models", api_key) as response:
            return str(json.load(response)["data"][0]["id"])
    except _CONNECTION_ERRORS as error:
        raise EngineError(f"the connection to {url} broke ({_reason(error)})") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise ConfigError(f"{url} lists no models; name one with --model-name") from None


def _open(url: str, api_key: str | None, body: dict[str, Any] | None = None) -> Any:
    """The open response; POST with a body, GET without.

    Raises:
        ConfigError: nothing answers there.
        RequestError: the server refused.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        request = urllib.request.Request(url, headers=headers, data=None if body is None else json.dumps(body).encode())
        return urllib.request.urlopen(request, timeout=_CONNECT_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            raise RequestError(f"{url} answered {error.code}: {_error_text(error)}") from None
    except (*_CONNECTION_ERRORS, ValueError) as error:
        reason = getattr(error, "reason", None) or _reason(error)
        raise ConfigError(f"no server answers at {url} ({reason}); run `tokenmill serve` or pass --url") from None


def _error_text(answer: Any) -> str:
    """The text of an error body in OpenAI's shape, or whatever there is."""
    try:
        body: bytes = answer.read()
    except _CONNECTION_ERRORS as error:
        return f"the connection broke ({_reason(error)})"
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:200]
