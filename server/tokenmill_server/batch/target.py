"""The server that a batch is sent to: its address, and connections for threads. Requests that a server could not take
or lost are sent again."""

import http.client
import socket
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_engine.errors import ConfigError, EngineError
from tokenmill_server.batch.lines import Answer, BatchRequest, answered, unanswered

PATIENCE_S = 300.0
"""How long a server that takes no request is asked again: one that was restarted loads its model."""
_REQUEST_TIMEOUT_S = 6 * 60 * 60.0
_MAX_ATTEMPTS = 3
"""For a request that a server took and did not answer, or answered with an error of its own."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 10.0
_BUSY = (429, 503)

_Connection = http.client.HTTPConnection
_CONNECTION_ERRORS = (OSError, http.client.HTTPException)


class ServerGoneError(EngineError):
    """There is no server any more: the run ends, and can be gone on with."""


@dataclass(slots=True, frozen=True)
class Target:
    """A server. `socket_path` instead of the URL's host: a Unix socket."""

    url: str
    """Without /v1."""
    api_key: str | None = None
    socket_path: str | None = None
    check_alive: Callable[[], None] = lambda: None
    """Raises ServerGoneError if there is no point in asking again."""

    def connect(self) -> _Connection:
        """A connection that is opened by its first request."""
        if self.socket_path is not None:
            return _UnixConnection(self.socket_path)
        parts = urllib.parse.urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=_REQUEST_TIMEOUT_S)

    @property
    def prefix(self) -> str:
        """What comes before every path."""
        return "" if self.socket_path is not None else urllib.parse.urlsplit(self.url).path


class _UnixConnection(_Connection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_REQUEST_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def target_at(url: str, api_key: str | None) -> Target:
    """A server that runs already. Raises ConfigError."""
    address = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
    try:
        parts = urllib.parse.urlsplit(address)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right:
        raise ConfigError(f"--base-url must be http://HOST[:PORT] or https://HOST[:PORT]; got {url!r}")
    return Target(address, api_key)


def is_healthy(target: Target) -> bool:
    """Whether the server takes requests."""
    connection = target.connect()
    try:
        connection.request("GET", f"{target.prefix}/health")
        return connection.getresponse().status == 200
    except _CONNECTION_ERRORS:
        return False
    finally:
        connection.close()


class Sender:
    """Sends one request at a time over one connection. For one thread."""

    def __init__(self, target: Target, stopped: threading.Event) -> None:
        self._target = target
        self._stopped = stopped
        self._connection = target.connect()

    def close(self) -> None:
        self._connection.close()

    def send(self, request: BatchRequest) -> Answer:
        """Raises ServerGoneError."""
        num_attempts = 0
        pause_s, deadline = _FIRST_PAUSE_S, time.monotonic() + PATIENCE_S
        while True:
            reply = self._post(request)
            if isinstance(reply, Answer):
                return reply
            num_attempts += reply.was_taken
            if num_attempts >= _MAX_ATTEMPTS:
                return reply.last_word
            self._target.check_alive()
            if not reply.was_taken and time.monotonic() >= deadline:
                raise ServerGoneError(f"{self._target.url} took no request for {PATIENCE_S:g} s ({reply.reason})")
            if self._stopped.wait(max(pause_s, reply.retry_after_s)):
                raise ServerGoneError("the run ends")
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _post(self, request: BatchRequest) -> "Answer | _Again":
        headers = {"Content-Type": "application/json", "X-Request-Id": f"batch-{uuid.uuid4().hex}"}
        if self._target.api_key:
            headers["Authorization"] = f"Bearer {self._target.api_key}"
        while True:
            was_open = self._connection.sock is not None
            try:
                if not was_open:
                    self._connection.connect()
            except OSError as error:
                self._connection.close()
                return _Again(_reason(error), unanswered(request, "no_connection", _reason(error)), was_taken=False)
            try:
                self._connection.request("POST", f"{self._target.prefix}{request.url}", request.body, headers)
                response = self._connection.getresponse()
                body = response.read()
            except _CONNECTION_ERRORS as error:
                self._connection.close()
                # A server may close an idle connection just as it is used again.
                if was_open and isinstance(error, (http.client.RemoteDisconnected, ConnectionError)):
                    continue
                lost = f"the connection broke before the answer was complete ({_reason(error)})"
                return _Again(lost, unanswered(request, "connection_lost", lost))
            request_id = response.headers.get("x-request-id") or headers["X-Request-Id"]
            return _judge(response, answered(request, response.status, request_id, body))


@dataclass(slots=True, frozen=True)
class _Again:
    """A request that may be sent again."""

    reason: str
    last_word: Answer
    """The answer if it is not."""
    was_taken: bool = True
    retry_after_s: float = 0.0


def _judge(response: http.client.HTTPResponse, answer: Answer) -> "Answer | _Again":
    should_retry = response.headers.get("x-should-retry", "").lower()
    if response.status in _BUSY and should_retry != "false":
        after = response.headers.get("retry-after", "")
        return _Again(
            f"HTTP {response.status}", answer, was_taken=False, retry_after_s=float(after) if after.isdecimal() else 0.0
        )
    if response.status >= 500 and response.status != 504 and should_retry != "false":
        return _Again(f"HTTP {response.status}", answer)
    return answer


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
