"""Raw event streams, read and left as clients do."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from tests.support.server import PATIENCE_S, wait_for

T = TypeVar("T")


@dataclass
class Stream:
    """What came over one stream. `events` are decoded data lines without the final [DONE]."""

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    """[DONE] came."""
    broken: bool = False
    """The connection ended in the middle."""
    body: str = ""
    """Of an answer that is no stream."""
    port: int = 0
    """Of our end of the connection."""

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    def text(self, index: int = 0) -> str:
        """Joined text of one choice."""
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in self.choices(index))

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for event in self.events for c in event.get("choices", []) if c["index"] == index]

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [c["finish_reason"] for c in self.choices(index) if c.get("finish_reason")]


def lines_of(response: httpx.Response) -> Iterator[str]:
    """Data lines as they arrive."""
    for line in response.iter_lines():
        if line.startswith("data:"):
            yield line[len("data:") :].strip()


def read_stream(
    url: str,
    path: str,
    fields: dict[str, Any],
    go_on: Callable[[Stream], bool] = lambda stream: True,
    headers: dict[str, str] | None = None,
) -> Stream:
    """Posts with `stream: true` (unless `fields` say otherwise) and reads to the end, or leaves as soon as `go_on`
    says no."""
    stream = Stream()
    _read_into(stream, f"{url}{path}", fields, go_on, headers)
    return stream


def _read_into(
    stream: Stream,
    url: str,
    fields: dict[str, Any],
    go_on: Callable[[Stream], bool],
    headers: dict[str, str] | None,
) -> None:
    try:
        with (
            httpx.Client(timeout=2 * PATIENCE_S, trust_env=False, headers=headers) as client,
            client.stream("POST", url, json={"stream": True, **fields}) as response,
        ):
            stream.port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            stream.status = response.status_code
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                response.read()
                stream.body = response.text
                return
            for data in lines_of(response):
                if data == "[DONE]":
                    stream.done = True
                    return
                stream.events.append(json.loads(data))
                if not go_on(stream):
                    return
    except httpx.TransportError:
        stream.broken = True


class BackgroundStream(threading.Thread):
    """A stream that is read in a thread while the test does something to the server."""

    def __init__(self, url: str, path: str, headers: dict[str, str] | None = None, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.stream = Stream()
        self.ended_at = 0.0
        """`time.monotonic`"""
        self._left = threading.Event()
        self._call = (f"{url}{path}", fields, lambda stream: not self._left.is_set(), headers)
        self.start()

    def run(self) -> None:
        _read_into(self.stream, *self._call)
        self.ended_at = time.monotonic()

    def wait_for_events(self, count: int = 1, timeout_s: float = PATIENCE_S) -> None:
        wait_for(lambda: len(self.stream.events) >= count, timeout_s, f"{count} events of a stream")

    def leave(self) -> None:
        """Goes away with the next event."""
        self._left.set()
        self.join(PATIENCE_S)

    @staticmethod
    def leave_all(streams: "Sequence[BackgroundStream]") -> None:
        """Each goes away with its next event; those that have none yet may get it when others are gone."""
        for stream in streams:
            stream._left.set()
        for stream in streams:
            stream.leave()

    def result(self, timeout_s: float = PATIENCE_S) -> Stream:
        """The whole stream; fails if it hangs."""
        self.join(timeout_s)
        assert not self.is_alive(), f"a request hangs after {timeout_s} s"
        return self.stream


def raw_request(url: str, path: str, fields: dict[str, Any]) -> socket.socket:
    """The socket of a request whose answer nobody reads. Closing it is how a client vanishes."""
    target = httpx.URL(url)
    assert target.port is not None
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((target.host, target.port), timeout=PATIENCE_S)
    connection.sendall(head.encode() + body)
    return connection


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of `calls`, each in a thread of its own, in their order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))
