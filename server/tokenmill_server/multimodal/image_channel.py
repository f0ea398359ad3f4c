"""What an API server and the processes that prepare its large images (`image_child`) say to each other: messages over a
socket, each behind its length, and the bytes of files and tensors behind the message that announces them.
"""

import select
import socket
import struct
import time
from typing import Any, Literal, TypeVar

import msgspec

from tokenmill_engine.config.media import MediaConfig
from tokenmill_server.multimodal.image_item import WantedImage
from tokenmill_server.multimodal.image_options import ImageOptions

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 2**20


class Setup(msgspec.Struct, frozen=True):
    """To a new process, once: the model whose images it prepares. It answers `Ready`."""

    media: MediaConfig
    options: ImageOptions


class Job(msgspec.Struct, frozen=True):
    """To a process that is idle: a file, whose bytes follow."""

    num_bytes: int
    max_pixels: int
    wanted: WantedImage
    memory_bytes: int
    """Address space that it may have meanwhile, beside what it had when it was ready."""
    cpu_s: int


class Answer(msgspec.Struct, frozen=True):
    """To `Counted` and `Keyed`. False: the image is not wanted, and the process is idle again."""

    goes_on: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All is loaded."""


class Counted(msgspec.Struct, frozen=True, tag=True):
    """The file is decoded, and will be so many tokens."""

    num_tokens: int


class Keyed(msgspec.Struct, frozen=True, tag=True):
    """The image's key."""

    key: bytes


class Tensor(msgspec.Struct, frozen=True):
    """A `MediaTensor` whose bytes follow."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class Packed(msgspec.Struct, frozen=True, tag=True):
    """The image is prepared. The process is idle again, once the tensors have been read."""

    grid: tuple[int, int, int] | None
    tensors: list[Tensor]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Something is wrong. The process is idle again where that is the image, and else ends."""

    kind: Literal["media", "memory", "program"]
    message: str


Reply = Ready | Counted | Keyed | Packed | Failed


class Channel:
    """One end. What it does raises TimeoutError beyond the deadline, and ConnectionError if the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._deadline: float | None = None

    def allow(self, seconds: float) -> None:
        """From now on, for all that follows."""
        self._deadline = time.monotonic() + seconds

    def send(self, message: msgspec.Struct, *data: Bytes) -> None:
        encoded = msgspec.msgpack.encode(message)
        for each in (_LENGTH.pack(len(encoded)) + encoded, *data):
            self._wait_no_longer()
            self._socket.sendall(each)

    def receive(self, kind: type[T]) -> T:
        """The next message. Raises ConnectionError for what is none."""
        message: T = self._receive(kind)
        return message

    def receive_reply(self) -> Reply:
        """As `receive`, whichever it is."""
        reply: Reply = self._receive(Reply)
        return reply

    def has_message(self, within_s: float) -> bool:
        """Whether one begins to arrive within so many seconds; or the end."""
        self._wait_no_longer()
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.read_into(memoryview(data))
        return data

    def read_into(self, view: memoryview) -> None:
        """Fills it."""
        while view:
            self._wait_no_longer()
            count = self._socket.recv_into(view)
            if not count:
                raise ConnectionResetError("the other end is gone")
            view = view[count:]

    def close(self) -> None:
        self._socket.close()

    def _receive(self, kind: Any) -> Any:
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise ConnectionError("the other end sends no messages")
        try:
            return msgspec.msgpack.decode(self.read(length), type=kind)
        except msgspec.MsgspecError as error:
            raise ConnectionError("the other end sends no messages") from error

    def _wait_no_longer(self) -> None:
        if self._deadline is None:
            return
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
