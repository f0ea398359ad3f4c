"""A web server for tests of fetching: counts what reaches it, down to single connections."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

Handler = Callable[[socket.socket], None]
"""Answers one request, of which the head has been read."""


def answer(body: bytes = b"", status: str = "200 OK", *headers: str, length: int | None = None) -> Handler:
    """A whole answer; `length` overrides the length that it declares."""
    size = len(body) if length is None else length
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {size}", *headers]).encode()

    def handle(connection: socket.socket) -> None:
        connection.sendall(head + b"\r\n\r\n" + body)

    return handle


def redirect(location: str, status: str = "302 Found") -> Handler:
    return answer(b"elsewhere", status, f"Location: {location}")


@dataclass
class MediaHost:
    """`pages` by path. Listens on 127.0.0.1."""

    pages: dict[str, Handler] = field(default_factory=dict)
    paths: list[str] = field(default_factory=list)
    """Of every request."""
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    port: int = 0
    tls: ssl.SSLContext | None = None
    """It speaks https."""
    stopped: threading.Event = field(default_factory=threading.Event)
    """For handlers that never end."""

    def url(self, path: str, host: str = "localhost") -> str:
        return f"http{'' if self.tls is None else 's'}://{host}:{self.port}{path}"

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if self.stopped.is_set():
                connection.close()
                return
            self.num_connections += 1
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _secured(self, connection: socket.socket) -> socket.socket:
        return connection if self.tls is None else self.tls.wrap_socket(connection, server_side=True)

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), self._secured(connection) as connection:
            head = b""
            while b"\r\n\r\n" not in head:
                data = connection.recv(65536)
                if not data:
                    return
                head += data
            self.heads.append(head.decode("latin-1"))
            path = head.split(b" ")[1].decode()
            self.paths.append(path)
            self.pages.get(path, answer(b"none", "404 Not Found"))(connection)


@contextlib.contextmanager
def media_host(tls: ssl.SSLContext | None = None, **pages: Handler) -> Iterator[MediaHost]:
    """A running host; `name=handler` is the page /name."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = MediaHost({f"/{name}": page for name, page in pages.items()}, port=listener.getsockname()[1], tls=tls)
        thread = threading.Thread(target=host.serve, args=(listener,))
        thread.start()
        try:
            yield host
        finally:
            host.stopped.set()
            with socket.create_connection(("127.0.0.1", host.port)):
                thread.join()
