"""Gets the bytes of media from http(s), data: and file: addresses, within limits of size and time.

Waiting for a host costs no thread. Knows nothing of what the bytes mean. Each host that is asked, also after a
redirect, is checked first (`addresses`).
"""

import asyncio
import base64
import binascii
import errno
import os
import re
import ssl
import stat
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import cache, partial
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin

import httptools

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.multimodal.addresses import Target, local_file, parse_target, resolve
from tokenmill_server.multimodal.connecting import Connection, first_to_connect
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.sites import site_of
from tokenmill_server.multimodal.turns import Turn
from tokenmill_server.processing.shown import shown
from tokenmill_server.version import __version__

_MAX_REDIRECTS = 5
_MAX_HEAD_BYTES = 64 * 1024
_READ_BYTES = 256 * 1024
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DATA_HEAD = re.compile(r"data:(?P<type>[^,;]*)(?P<options>(;[^,;]*)*),", re.IGNORECASE)
_DATA_HEAD_CHARS = 512
_PIECE_CHARS = 64 * 1024


class Budget:
    """Bytes that the media of one request may still have. Threads share it."""

    def __init__(self, max_bytes: int, on_take: Callable[[int], None] | None = None) -> None:
        """`on_take` is called with the bytes that are taken, and may raise TokenmillError."""
        self.max_bytes = max_bytes
        self._left = max_bytes
        self._on_take = on_take
        self._lock = threading.Lock()

    def check(self, num_bytes: int) -> None:
        """Raises MediaError if so many more would be too many."""
        if num_bytes > self._left:
            raise MediaError(
                f"the media of the request have more than {self.max_bytes} bytes, the limit that --max-media-bytes sets"
            )

    def take(self, num_bytes: int) -> None:
        """Raises MediaError if these are too many, and what `on_take` does."""
        with self._lock:
            self.check(num_bytes)
            self._left -= num_bytes
        if self._on_take is not None:
            self._on_take(num_bytes)


def scheme_of(url: str) -> str:
    """In lower case; empty if there is none."""
    head, colon, _ = url[:16].partition(":")
    return head.lower() if colon else ""


def read_data_url(url: str, budget: Budget) -> bytes:
    """The bytes within a data: address, base64 or percent-encoded (RFC 2397). Blocks: call it in a thread.

    Raises MediaError.
    """
    match = _DATA_HEAD.match(url[:_DATA_HEAD_CHARS])
    if match is None:
        raise MediaError("a data: address looks like data:image/png;base64,iVBORw0...")
    if not match["options"].lower().endswith(";base64"):
        data = _unquoted(url[match.end() :])
        budget.take(len(data))
        return data
    budget.check((len(url) - match.end()) // 4 * 3 - 3)
    start, text = match.end(), url
    if "%" in url:
        start, text = 0, _unquoted(url[start:]).decode("latin-1")
    try:
        data = b"".join(_from_base64(text, start))
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"the data: address is not base64: {error}") from error
    budget.take(len(data))
    return data


def _from_base64(text: str, start: int) -> Iterator[bytes]:
    """What the characters from `start` on say, piece by piece: other threads get no turn in one. White space says
    nothing, and the padding may be missing.

    Raises ValueError.
    """
    left, has_ended = "", False
    for begin in range(start, len(text), _PIECE_CHARS):
        piece = left + "".join(text[begin : begin + _PIECE_CHARS].split())
        left = piece[len(piece) // 4 * 4 :]
        piece = piece[: len(piece) - len(left)]
        if has_ended and (piece or left):
            raise ValueError("it goes on behind its padding")
        has_ended = has_ended or piece.endswith("=")
        yield base64.b64decode(piece, altchars=_altchars(piece), validate=True)
    yield base64.b64decode(left + "=" * (-len(left) % 4), altchars=_altchars(left), validate=True)


def _unquoted(text: str) -> bytes:
    """Percent-decoded piece by piece: each escape is an object meanwhile, and other threads get no turn in a piece."""
    pieces, start = [], 0
    while start < len(text):
        end = start + _PIECE_CHARS
        if end < len(text) and (escape := text.rfind("%", end - 2, end)) >= 0:
            end = escape
        pieces.append(unquote_to_bytes(text[start:end]))
        start = end
    return b"".join(pieces)


def _altchars(text: str) -> bytes | None:
    """Some encoders write the URL-safe alphabet."""
    return b"-_" if "-" in text or "_" in text else None


def read_file(url: str, settings: MediaSettings, budget: Budget) -> bytes:
    """The bytes of a file. Blocks: call it in a thread. Raises MediaError."""
    path = local_file(url, settings)
    try:
        if path.is_dir():
            raise MediaError("the file: address names no regular file")
        # A pipe or a device must not be waited for, and no link that somebody put there meanwhile be followed.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise MediaError("the file: address names no regular file")
            if os.readlink(f"/proc/self/fd/{stream.fileno()}") != str(path):  # nor one in its place in a folder above
                raise MediaError("the file of the file: address was moved while it was read")
            budget.check(status.st_size)
            data = stream.read(status.st_size + 1)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise MediaError(f"the file of the file: address cannot be read: {reason}") from error
    budget.take(len(data))
    return data


async def fetch(
    url: str, settings: MediaSettings, budget: Budget, kind: str = "image", turn: Turn | None = None
) -> bytes:
    """The bytes at an http or https address of an image or a video. Hosts are asked when it is this file's `turn`,
    which it still is in the end; others have it while names are looked up. None: it is always.

    Raises MediaError, at the latest when the time is up, and what `budget` does.
    """
    timeout_s = settings.video_fetch_timeout_s if kind == "video" else settings.fetch_timeout_s
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await _follow(url, settings, budget, turn, limit)
    except TimeoutError as error:
        raise MediaError(
            f"the media at {shown(url)} did not come within {timeout_s:g} s, the limit that --{kind}-fetch-timeout sets"
        ) from error


async def _follow(
    url: str, settings: MediaSettings, budget: Budget, turn: Turn | None, limit: asyncio.Timeout
) -> bytes:
    here = url
    for _ in range(_MAX_REDIRECTS + 1):
        target = parse_target(here)
        if turn is not None:
            turn.give()
        addresses = await resolve(target, settings)
        if turn is not None:
            await turn.take(site_of(target.host), limit)
        answer = await _ask(target, addresses, budget)
        if answer.status not in _REDIRECTS:
            return answer.body(url)
        if not settings.allow_redirects:
            raise MediaError(f"the media address {shown(url)} redirects, which --no-media-url-allow-redirects forbids")
        if not answer.location:
            raise MediaError(f"the media address {shown(url)} redirects to nowhere")
        try:
            here = urljoin(here, answer.location)
        except ValueError as error:
            raise MediaError(f"the media address {shown(url)} redirects to a malformed address") from error
    raise MediaError(f"the media address {shown(url)} redirects more than {_MAX_REDIRECTS} times")


async def _ask(target: Target, addresses: list[str], budget: Budget) -> "_Answer":
    """Sends GET to the first address that takes a connection, and reads the answer."""
    answer = _Answer(budget)
    reader, writer = await _connect(target, addresses)
    try:
        writer.write(_request(target))
        await writer.drain()
        while not answer.is_complete:
            data = await reader.read(_READ_BYTES)
            if not data:
                answer.end()
                break
            answer.feed(data)
    except (OSError, ssl.SSLError) as error:
        raise MediaError(f"the connection to {shown(target.host)} broke while media were read") from error
    finally:
        writer.transport.abort()  # nothing that is still on the way is of interest
        answer.close()
    return answer


async def _connect(target: Target, addresses: list[str]) -> Connection:
    failure: Exception | None = None
    context = _tls() if target.is_https else None
    name = target.host if target.is_https else None

    def connect(address: str) -> Coroutine[Any, Any, Connection]:
        return asyncio.open_connection(address, target.port, ssl=context, server_hostname=name, limit=_READ_BYTES)

    try:
        return await first_to_connect([partial(connect, address) for address in addresses])
    except (OSError, ssl.SSLError) as error:
        failure = error
    if isinstance(failure, ssl.SSLCertVerificationError):
        raise MediaError(f"the certificate of {shown(target.host)} is not valid: {failure.verify_message}")
    raise MediaError(f"the host {shown(target.host)} of the media address cannot be reached") from failure


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _request(target: Target) -> bytes:
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        f"User-Agent: tokenmill/{__version__}",
        "Accept: image/*, */*;q=0.5",
        "Accept-Encoding: identity",  # an archive may become any number of bytes
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


class _Answer:
    """One HTTP answer while it comes in; called back by the parser."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        # In one piece: the allocator gives a large block back, and keeps the place of thousands of small ones.
        self._body = bytearray()
        self._num_bytes = 0
        self._head_is_whole = False
        self._failure: TokenmillError | None = None
        self.is_complete = False
        self.status = 0

    @property
    def location(self) -> str:
        """Where the answer redirects to."""
        value = self._headers.get(b"location", b"").strip()
        try:
            return value.decode()  # which some hosts send as it is, and browsers read so
        except UnicodeDecodeError:
            return value.decode("latin-1")

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Raises MediaError, and what the budget does."""
        self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise self._failure or MediaError("the host of the media address does not speak HTTP") from error
        if self._failure is not None:
            raise self._failure
        # Headers, those behind the body, and what is around each chunk: chunks of single bytes would be mostly that.
        most = _MAX_HEAD_BYTES + len(self._body) // 8
        if not self.is_complete and self._num_bytes - len(self._body) > most:
            raise MediaError(
                f"the host of the media address sends more than {most} bytes in headers and around the media"
            )

    def end(self) -> None:
        """The host has sent everything. Raises MediaError if that is not all it had promised."""
        framed = b"content-length" in self._headers or b"transfer-encoding" in self._headers
        if not self._head_is_whole or framed:
            raise MediaError("the host of the media address ended the connection early")
        self.is_complete = True

    def close(self) -> None:
        """Nothing more is fed. The parser refers to this object, which would live on until cycles are looked for."""
        del self._parser

    def body(self, url: str) -> bytes:
        """Raises MediaError unless there is one."""
        if self.status != 200:
            raise MediaError(f"the host of the media address {shown(url)} answers with status {self.status}")
        return bytes(self._body)

    # --- called by the parser; what is raised here reaches `feed` wrapped, so the first failure is kept -------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:  # an interim answer, such as 103: another follows
            self._headers.clear()
            return
        self._head_is_whole = True
        if self.status != 200:  # whatever the host says beside is of no interest
            self.is_complete = True
            return
        encoding = self._headers.get(b"content-encoding", b"identity").strip().lower()
        length = self._headers.get(b"content-length", b"").strip()
        if encoding not in (b"", b"identity"):
            self._failure = MediaError(f"the media are compressed as {shown(encoding.decode('latin-1'))}")
        elif length.isdigit():
            self._try(lambda: self._budget.check(int(length)))

    def on_body(self, data: bytes) -> None:
        if self._failure is None and not self.is_complete:
            self._body += data
            self._try(lambda: self._budget.take(len(data)))

    def on_message_complete(self) -> None:
        self.is_complete = self._head_is_whole

    def _try(self, check: Callable[[], None]) -> None:
        try:
            check()
        except TokenmillError as error:
            self._failure = error
