"""A scripted OpenAI server on a real socket: what it sends, and when, is known, so what the client reports can be
checked. It runs in a thread of its own with its own event loop."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

_PATIENCE_S = 60.0


def event(payload: dict[str, Any] | str, newline: bytes = b"\n") -> bytes:
    """One server-sent event."""
    text = payload if isinstance(payload, str) else json.dumps(payload)
    return b"data: " + text.encode() + newline * 2


def text_event(text: str, finish: str | None = None) -> bytes:
    return event({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}})


DONE = event("[DONE]")


@dataclass
class Reply:
    """What to answer. `pieces` are (seconds to wait, bytes), each written by itself as one body chunk; instead of
    seconds there may be what is waited for.

    `framing` is `chunked`, `length` or `close` (the body ends with the connection); `drop` closes the connection
    after the pieces without ending the body; `close_after` closes it after a complete reply without saying so.
    """

    pieces: "Sequence[tuple[float | Callable[[], bool], bytes]]" = ()
    status: int = 200
    framing: str = "chunked"
    drop: bool = False
    close_after: bool = False


@dataclass
class Seen:
    """One request as the server saw it. Times are `time.perf_counter`, those of pieces just before they are sent."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int
    arrived_s: float
    sent_s: list[float] = field(default_factory=list)
    finished_s: float = 0.0


Script = Callable[[Seen, int], Reply]
"""(request, its position among all requests) -> reply."""


class ScriptedServer:
    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.port = port
        """0 until it listens: then one that was free."""
        self.seen: list[Seen] = []
        self.max_open = 0
        """Requests that were open at the same time."""
        self._open = 0
        self._connections = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(_PATIENCE_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def once_open(self, count: int) -> "tuple[Callable[[], bool], bytes]":
        """A first piece of a reply, of no meaning, that is not sent before so many requests are open at once."""
        return lambda: self.max_open >= count, b": open\n\n"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_PATIENCE_S)

    def _serve(self) -> None:
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        connection = self._connections
        try:
            while (seen := await self._read(reader, connection)) is not None:
                self._open += 1
                self.max_open = max(self.max_open, self._open)
                index = len(self.seen)
                self.seen.append(seen)
                keep = await self._answer(writer, seen, self.script(seen, index))
                seen.finished_s = time.perf_counter()
                self._open -= 1
                if not keep:
                    break
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, connection: int) -> Seen | None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return None
        request_line, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = request_line.split(" ")
        return Seen(method, path, headers, json.loads(body) if body else None, connection, time.perf_counter())

    async def _answer(self, writer: asyncio.StreamWriter, seen: Seen, reply: Reply) -> bool:
        head = f"HTTP/1.1 {reply.status} Scripted\r\nContent-Type: text/event-stream\r\n"
        if reply.framing == "chunked":
            head += "Transfer-Encoding: chunked\r\n"
        elif reply.framing == "length":
            head += f"Content-Length: {sum(len(data) for _, data in reply.pieces)}\r\n"
        else:
            head += "Connection: close\r\n"
        writer.write(head.encode() + b"\r\n")
        for delay, data in reply.pieces:
            await self._wait(delay)
            seen.sent_s.append(time.perf_counter())
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if reply.framing == "chunked" else data)
            await writer.drain()
        if reply.drop or reply.framing == "close":
            return False
        if reply.framing == "chunked":
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return not reply.close_after

    @staticmethod
    async def _wait(delay: "float | Callable[[], bool]") -> None:
        if not callable(delay):
            await asyncio.sleep(delay)
            return
        async with asyncio.timeout(_PATIENCE_S):
            while not delay():
                await asyncio.sleep(0.001)
