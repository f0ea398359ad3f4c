"""Servers that something happens to, and what must hold afterwards."""

import contextlib
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.support.connections import taken_by_each, wait_until_taken
from tests.support.ports import free_port
from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, start_server, wait_for
from tests.support.streams import raw_request

_MAX_CALLS = 64
ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}
_SHARED_MEMORY = "/dev/shm/"


@contextlib.contextmanager
def traced_server(*arguments: str, wait: bool = True) -> Iterator[tuple[Server, Path]]:
    """A server, at a port that nobody else takes afterwards, and the folder for its temporary files."""
    with (
        tempfile.TemporaryDirectory(prefix="tm-") as folder,
        start_server(*arguments, env={"TMPDIR": folder}, wait=wait, port=free_port()) as server,
    ):
        yield server, Path(folder)


class Traces:
    """What a server has in the machine: its processes, its port, its files."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._folder = folder
        self.port = httpx.URL(server.url).port or 0
        self._processes = server.descendants()
        self._shared_memory = {path for process in self._processes for path in _mapped(process.pid)}

    def check_gone(self) -> None:
        """Nothing is left, and the port is free."""
        wait_for_ends(self._processes)
        # After the death of the launcher its children see to the folder, when they notice.
        wait_for(lambda: list(self._folder.iterdir()) == [], PATIENCE_S, "empty folder for temporary files")
        assert [path for path in self._shared_memory if os.path.exists(path)] == []
        if self.port:
            with socket.create_server(("127.0.0.1", self.port)):
                pass


def _mapped(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        return {line[line.index(_SHARED_MEMORY) :] for line in lines if _SHARED_MEMORY in line}
    return set()


class Call(threading.Thread):
    """An endless request over a connection of its own, and all that comes over it until its end."""

    def __init__(self, url: str, streams: bool) -> None:
        super().__init__(daemon=True)
        self.connection = raw_request(url, "/v1/completions", {**ENDLESS, "stream": streams})
        self.connection.settimeout(None)
        self._received = bytearray()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while not self.is_complete and (data := self.connection.recv(65536)):
                self._received += data
        self.connection.close()

    @property
    def num_bytes(self) -> int:
        return len(self._received)

    @property
    def is_complete(self) -> bool:
        """Whether there is an answer, and not just the end of the connection."""
        if self._received.endswith(b"0\r\n\r\n"):
            return True
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", bytes(head).lower()) if separator else None
        return length is not None and len(body) >= int(length[1])

    @property
    def tells_an_error(self) -> bool:
        """Whether the answer says that something went wrong, as an error of a stream or by its status."""
        status = int(self._received.split(None, 2)[1]) if self._received else 0
        return self.is_complete and b'"error"' in self._received and (status >= 500 or b"[DONE]" in self._received)

    def leave(self) -> None:
        """The client goes away."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.join(PATIENCE_S)


class Load:
    """Endless requests, streamed and whole, of which each API server has some. Engine cores that take two at once let
    half of them wait, or more."""

    def __init__(self, server: Server, num_engines: int) -> None:
        self.calls = [self._call(server, number) for number in range(4 * num_engines)]
        while not all(wait_until_taken(server, self._connections())):
            assert len(self.calls) < _MAX_CALLS, "an API server takes no connections"
            self.calls.append(self._call(server, len(self.calls)))
        num_running = 2 * num_engines
        expected = {"running": num_running, "waiting": len(self.calls) - num_running}
        wait_for(
            lambda: {state: server.metric(f"num_requests_{state}") for state in expected} == expected,
            PATIENCE_S,
            f"engine cores with {expected}",
        )

    def check_answered(self, told: bool) -> None:
        """Everybody hears that it is over: `told` by an error, else at least by the end of the connection."""
        for call in self.calls:
            call.join(PATIENCE_S)
            assert not call.is_alive(), f"a request hangs after {PATIENCE_S} s"
            assert call.tells_an_error or not (told or call.is_complete)

    def of_api_servers(self, server: Server) -> list[int]:
        """How many each API server has taken."""
        return taken_by_each(server, self._connections())

    def over(self) -> list[Call]:
        """Calls that have ended."""
        return [call for call in self.calls if not call.is_alive()]

    def leave(self) -> None:
        """All clients go away."""
        for call in self.calls:
            call.leave()

    def _connections(self) -> list[socket.socket]:
        return [call.connection for call in self.calls]

    @staticmethod
    def _call(server: Server, number: int) -> Call:
        return Call(server.url, streams=number % 2 == 0)
