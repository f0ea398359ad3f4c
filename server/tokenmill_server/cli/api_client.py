"""What `tokenmill chat` and `tokenmill complete` share: the options that name a server, and answers streamed from it.
Any server that speaks the OpenAI API will do."""

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill_engine.errors import ConfigError, EngineError, RequestError, TokenmillError

KEY_VARIABLES = ("TOKENMILL_API_KEY", "VLLM_API_KEY", "OPENAI_API_KEY")

_CONNECT_TIMEOUT_S = 600.0
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)
"""Whatever may happen on a connection; timeouts and urllib's own errors are OSErrors."""
_COMMAND = re.compile(r"/\w*(\s|$)")
"""How a line begins that is no question; a path is one."""

Event = dict[str, Any]


@dataclass(slots=True)
class ApiClient:
    """One model of one server. `url` ends in /v1."""

    url: str
    model: str
    api_key: str | None
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of every request."""

    def stream(self, route: str, fields: dict[str, Any]) -> Iterator[Event]:
        """Events of the answer as they arrive; `route` comes behind /v1.

        Raises:
            TokenmillError: the server refused or failed.
        """
        body = {"model": self.model, "stream": True, **fields, **self.options}
        with _open(f"{self.url}{route}", self.api_key, body) as response:
            for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[len(b"data:") :].strip()
                if data == b"[DONE]":
                    return
                yield _event(data)
        raise EngineError("the server closed the stream before its end")


def texts(events: Iterable[Event], text_of: Callable[[Any], str | None]) -> Iterator[str]:
    """What each choice of each event says, as `text_of` finds it. Raises EngineError for what is none of this API."""
    for event in events:
        try:
            yield from [text_of(choice) or "" for choice in event["choices"]]
        except (KeyError, TypeError, AttributeError):
            raise EngineError(f"the server sent what is no part of an answer: {str(event)[:100]}") from None


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Those that `client_of` reads."""
    parser.add_argument("--url", help="base URL; http:// and /v1 may be left out [http://HOST:PORT/v1]")
    parser.add_argument("--host", help="the server's address [127.0.0.1]")
    parser.add_argument("--port", type=int, help="the server's port [8000]")
    parser.add_argument("--model-name", help="model to ask for [the first one that the server lists]")
    parser.add_argument("--api-key", help=f"[{' or '.join(KEY_VARIABLES)}]")


def add_answer_options(parser: argparse.ArgumentParser, longest: str) -> None:
    """Those about every answer; `longest` says what holds without --max-tokens."""
    parser.add_argument("--max-tokens", type=int, help=f"longest answer [{longest}]")
    parser.add_argument("--temperature", type=float, help="randomness [the server's default]")
    parser.add_argument("--stats", action="store_true", help="print the time to the first piece and the rate")


def client_of(options: argparse.Namespace) -> ApiClient:
    """Raises ConfigError or RequestError: an option is wrong, or no server answers."""
    if options.quick is not None and not options.quick.strip():
        raise ConfigError("--quick needs a text, got an empty one")
    url = _base_url(options)
    api_key = options.api_key or key_of_environment()
    model = options.model_name or _first_model(url, api_key)
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    return ApiClient(url, model, api_key, {key: value for key, value in sampling.items() if value is not None})


def key_of_environment() -> str | None:
    """The API key that variables name, if one does."""
    return next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)


def lines_of_user(commands: dict[str, Callable[[], None]], explanation: str) -> Iterator[str]:
    """Lines from standard input that are not empty, until its end or `/exit`. Lines that are `commands` call them; any
    other that looks like one, and `/help`, print the `explanation`."""
    import readline  # noqa: F401  (line editing and history for input())

    while True:
        try:
            line = input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        if _COMMAND.match(line):
            command = line.strip()
            if command == "/exit":
                return
            if command in commands:
                commands[command]()
            else:
                refusal = "" if command == "/help" else f"there is no {command}; a question may begin with a space. "
                sys.stdout.write(f"{refusal}{explanation}\n")
        elif line.strip():
            yield line


def answered(pieces: Iterable[str], *, stats: bool) -> str | None:
    """As `print_pieces`, but None after an error, which is shown, and after Ctrl-C."""
    try:
        return print_pieces(pieces, stats=stats)
    except TokenmillError as error:
        sys.stderr.write(f"error: {error.message}\n")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    return None


def print_pieces(pieces: Iterable[str], *, stats: bool) -> str:
    """Prints the answer while it arrives; returns it whole."""
    started = time.monotonic()
    first: float | None = None
    printed: list[str] = []
    for piece in pieces:
        if piece:
            first = first or time.monotonic()
            printed.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    if stats and first is not None:
        rate = (len(printed) - 1) / max(time.monotonic() - first, 1e-9)
        sys.stderr.write(f"first piece after {first - started:.3f} s, then {rate:.1f} pieces/s\n")
    return "".join(printed)


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


def _event(data: bytes) -> Event:
    """Raises EngineError for an event that tells of an error, or is none of this API."""
    try:
        event: Event = json.loads(data)
        if "error" in event:
            raise EngineError(str(event["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        raise EngineError(f"the server sent what is no part of an answer: {data[:100]!r}") from None
    return event


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
