"""A typed, ordered message channel over a stream socket: the launcher and one child process, or two launchers.

Frames are a 4-byte little-endian length and a msgspec-json document. The end of file means that the other side is
gone. Sending is thread-safe and blocks, for as long as the socket's SO_SNDTIMEO says if it has one; receiving belongs
to one thread, or to one event loop (`receive_available` with `loop.add_reader(channel.fileno(), ...)`).
"""

import contextlib
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_CHUNK_BYTES = 65536


class ChannelClosedError(Exception):
    """The other side is gone."""


class ForeignFrameError(ChannelClosedError):
    """What the other side says is no frame of ours; the channel is of no use any more."""


class ControlChannel(Generic[T]):
    """One end of the channel; `message_type` is the struct or union of structs that this end receives, none longer than
    `max_message_bytes`."""

    def __init__(self, sock: socket.socket, message_type: Any, *, max_message_bytes: int = _MAX_MESSAGE_BYTES) -> None:
        sock.setblocking(True)
        self._socket = sock
        self.max_message_bytes = max_message_bytes
        """May change with what is known of the other side."""
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(message_type)
        self._encoder = msgspec.json.Encoder()
        self._send_lock = threading.Lock()
        self._received = bytearray()

    @classmethod
    def from_fd(cls, fd: int, message_type: Any) -> "ControlChannel[T]":
        """The child's end, inherited as file descriptor `fd`. Not inherited further."""
        sock = socket.socket(fileno=fd)
        sock.set_inheritable(False)
        return cls(sock, message_type)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; blocks while the other side does not read.

        Raises:
            ChannelClosedError: the other side is gone, or has not read for as long as SO_SNDTIMEO says; then the
                channel has come to its end for both.
        """
        body = self._encoder.encode(message)
        try:
            with self._send_lock:
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except BlockingIOError as error:
            # Part of a frame may be on its way, so nothing can follow it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            raise ChannelClosedError("the other side does not read") from error
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self) -> T:
        """Block until a message is there.

        Raises:
            ChannelClosedError: the other side is gone.
        """
        while True:
            message = self._next_message()
            if message is not None:
                return message
            self._read(0)

    def receive_available(self) -> list[T]:
        """Everything that has arrived; does not block.

        Raises:
            ChannelClosedError: the other side is gone. Raised only once all complete messages were returned.
        """
        closed: ChannelClosedError | None = None
        try:
            self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass
        except ChannelClosedError as error:
            closed = error
        messages = []
        while (message := self._next_message()) is not None:
            messages.append(message)
        if closed is not None and not messages:
            raise closed
        return messages

    def close(self) -> None:
        """Close this end; the other side reads an end of file."""
        self._socket.close()

    def _read(self, flags: int) -> None:
        try:
            data = self._socket.recv(_CHUNK_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of file")
        self._received += data

    def _next_message(self) -> T | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > self.max_message_bytes:
            raise ForeignFrameError(f"a frame of {length} bytes is not one of ours")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return self._decoder.decode(body)
