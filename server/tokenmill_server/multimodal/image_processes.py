"""A few processes (`image_child`) that decode and prepare large images for this one, so that its threads need not: they
would keep the event loop from the interpreter's lock.

They are started when there is work, stay for more, and end when there has been none for a while. Blocks until an image
is prepared: call it in a thread.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.ipc.stopped import StoppedChildren
from tokenmill_engine.messages import MediaTensor
from tokenmill_server.multimodal.asking import LOOK_UP_S, Asking, Check
from tokenmill_server.multimodal.errors import CRASHES, DecoderKilledError, MediaError
from tokenmill_server.multimodal.image_channel import (
    Answer,
    Channel,
    Counted,
    Failed,
    Job,
    Keyed,
    Packed,
    Ready,
    Setup,
)
from tokenmill_server.multimodal.image_item import WantedImage
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.processor import ImageProcessor

_PROGRAM = "tokenmill_server.multimodal.image_child"
_ENVIRONMENT = frozenset({"LD_LIBRARY_PATH"})
"""What such a process is told of this one's: where the interpreter's own libraries may be, and no more."""
_BASE_MEMORY_BYTES = 128 * 2**20
"""What small things take, and what allocators keep."""
_IDLE_S = 60.0
_TIMEOUT_S = 60.0
"""For an image, and a second more for each megapixel: some hundred times what it takes. For starting a process too."""
_END_S = 1.0
_RETRY_S = 60.0
"""After a process could not be started."""
_GRACE_S = 1.0
"""For an image that nobody wants any more, before its process is ended: starting another takes half of that."""


class CannotStartError(Exception):
    """No such process can be had at the moment."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The file of an image, of which no more than the header was looked at."""

    data: bytes
    height: int
    width: int
    max_pixels: int
    """What it may have."""


def memory_bytes(processor: ImageProcessor, file: ImageFile) -> int:
    """What decoding and preparing an image in a process takes at the worst."""
    return processor.memory_bytes(file.height, file.width) + 2 * len(file.data) + _BASE_MEMORY_BYTES


class ImageProcesses:
    """Of one API server and one model. Used from many threads at a time."""

    def __init__(
        self, processor: ImageProcessor, max_processes: int, idle_s: float = _IDLE_S, timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._processor = processor
        self._max_processes = max_processes
        self._idle_s, self._timeout_s = idle_s, timeout_s
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._num_starting = 0
        self._changed = threading.Condition()
        self._timer: threading.Timer | None = None
        self._is_closed = False
        self._retry_at, self._reason = 0.0, ""

    def prepare(
        self, file: ImageFile, wanted: WantedImage, reserve: Callable[[int], None], asking: Asking
    ) -> PreparedItem:
        """As `make_item` of what is in the file, once a process has time. `reserve` is called with the bytes of memory
        that it takes before anything is decoded, and may wait.

        Raises MediaError for a file that is no image, is damaged, makes its decoder crash, or takes too long or too
        much; DecoderKilledError if the process has been killed; CannotStartError if there is none; what `asking`
        does.
        """
        process = self._take(asking.check)
        try:
            num_bytes = memory_bytes(self._processor, file)
            reserve(num_bytes)
            return process.prepare(file, wanted, num_bytes, asking)
        finally:
            self._give_back(process)

    def close(self) -> None:
        """Ends all of them at once; whoever waits for one hears that it was killed."""
        with self._changed:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
            for process in self._all:
                process.kill()
            for process in self._idle:  # who has one of the others ends it
                self._end(process)
            self._idle.clear()
            self._changed.notify_all()

    def _take(self, check: Check) -> "_Process":
        """One that is idle, or a new one if there may be more."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise OverloadedError("the server is shutting down")
                while self._idle:
                    process = self._idle.pop()
                    if process.is_alive:
                        return process
                    self._end(process)
                if len(self._all) + self._num_starting < self._max_processes:
                    break
                self._changed.wait(LOOK_UP_S)
                check()
            if time.monotonic() < self._retry_at:
                raise CannotStartError(self._reason)
            self._num_starting += 1
        return self._start()

    def _start(self) -> "_Process":
        process = None
        try:
            process = self._launch()
            process.set_up(Setup(self._processor.media, self._processor.options))
        except Exception as error:
            with self._changed:
                if process is not None:
                    self._end(process)
                self._changed.notify_all()
                if self._is_closed:
                    raise OverloadedError("the server is shutting down") from error
                if not isinstance(error, OSError):
                    raise
                self._retry_at = time.monotonic() + _RETRY_S
                self._reason = str(error) or "it did not answer in time"
                raise CannotStartError(self._reason) from error
        return process

    def _launch(self) -> "_Process":
        process = None
        try:
            process = _Process(self._timeout_s)
        finally:
            with self._changed:
                self._num_starting -= 1
                if process is not None:
                    self._all.add(process)
                    if self._is_closed:
                        process.kill()
        return process

    def _give_back(self, process: "_Process") -> None:
        with self._changed:
            if process.is_idle and not self._is_closed:
                process.idle_since = time.monotonic()
                self._idle.append(process)
                self._watch(self._idle_s)
            else:
                self._end(process)
            self._changed.notify_all()

    def _end(self, process: "_Process") -> None:
        self._all.discard(process)
        process.end()

    def _watch(self, seconds: float) -> None:
        """Looks for those that have been idle for long, so much later."""
        if self._timer is not None:
            return
        self._timer = threading.Timer(seconds, self._end_idle)
        self._timer.daemon = True
        try:
            self._timer.start()
        except RuntimeError:  # no more threads
            self._timer = None

    def _end_idle(self) -> None:
        with self._changed:
            self._timer = None
            now = time.monotonic()
            late = [each for each in self._idle if now - each.idle_since >= self._idle_s]
            self._idle = [each for each in self._idle if each not in late]
            for process in late:
                self._end(process)
            if self._idle:
                self._watch(self._idle_s - now + min(each.idle_since for each in self._idle))


class _Process:
    """One of them. Used by one thread at a time, but for `kill`."""

    def __init__(self, timeout_s: float) -> None:
        """Raises OSError if the system does not let it start."""
        self._timeout_s = timeout_s
        self.is_idle = False
        """Whether it waits for a file."""
        self.idle_since = 0.0
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # decoders write what they think of broken files
                pass_fds=(theirs.fileno(),),
                env={
                    **{name: os.environ[name] for name in _ENVIRONMENT & os.environ.keys()},
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "OPENBLAS_NUM_THREADS": "1",
                },
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def set_up(self, setup: Setup) -> None:
        """Waits until it is ready. Raises OSError if it is not, DecoderKilledError if it is stopped."""
        self._channel.allow(self._timeout_s)
        self._channel.send(setup)
        self._await(lambda: None)
        self._channel.receive(Ready)
        self.is_idle = True

    def prepare(self, file: ImageFile, wanted: WantedImage, memory_bytes: int, asking: Asking) -> PreparedItem:
        """As `ImageProcesses.prepare`."""
        seconds = self._timeout_s + file.height * file.width / 1e6
        job = Job(len(file.data), file.max_pixels, wanted, memory_bytes, math.ceil(seconds))
        self.is_idle = False
        self._channel.allow(seconds)
        try:
            self._channel.send(job, file.data)
            return self._follow(asking, memory_bytes)
        except (ConnectionError, TimeoutError) as error:
            raise self._failure(isinstance(error, TimeoutError), seconds) from error

    def _follow(self, asking: Asking, memory_bytes: int) -> PreparedItem:
        num_tokens, key = 0, b""
        while True:
            self._await(asking.check)
            match self._channel.receive_reply():
                case Counted(num_tokens):
                    try:
                        asking.admit(num_tokens)
                    except BaseException:
                        self._stop()
                        raise
                    self._channel.send(Answer(True))
                case Keyed(key):
                    item = asking.find(key)
                    if item is not None:
                        self._stop()
                        return item
                    self._channel.send(Answer(True))
                case Packed() as packed:
                    return self._read(packed, num_tokens, key)
                case Failed(kind, message):
                    self.is_idle = kind == "media"
                    if kind == "program":
                        raise RuntimeError(f"an image was not prepared: {message}")
                    too_much = (
                        f"the image takes more memory to decode than it may, {memory_bytes // 2**20} MiB for its size"
                    )
                    raise MediaError(message or too_much)
                case unexpected:
                    raise ConnectionError(f"the process says {unexpected}")

    def _await(self, check: Check) -> None:
        """Until there is a message, or the end. Raises DecoderKilledError if the process is stopped for long."""
        stopped = StoppedChildren([self._process.pid])
        while not self._channel.has_message(LOOK_UP_S):
            for _, fault in stopped.look():
                raise DecoderKilledError(f"the process that prepared the image {fault}; send it again")
            try:
                check()
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        """The image is not wanted while it is being decoded. The process is idle again if it soon asks, and else of no
        use."""
        self._channel.allow(_GRACE_S)
        with suppress(OSError):
            if isinstance(self._channel.receive_reply(), Counted | Keyed):
                self._stop()

    def _stop(self) -> None:
        """The image is not wanted."""
        with suppress(OSError):
            self._channel.send(Answer(False))
            self.is_idle = True

    def _read(self, packed: Packed, num_tokens: int, key: bytes) -> PreparedItem:
        tensors = {}
        for each in packed.tensors:
            data = np.empty(each.num_bytes, np.uint8).data
            self._channel.read_into(data)
            tensors[each.name] = MediaTensor(each.dtype, each.shape, data.toreadonly())
        self.is_idle = True
        return PreparedItem("image", key, num_tokens, packed.grid, tensors)

    def _failure(self, is_late: bool, seconds: float) -> Exception:
        """Why it does not answer."""
        if not is_late:
            with suppress(subprocess.TimeoutExpired):  # what closes its end is ending, most likely
                self._process.wait(self._timeout_s)
        status = self._process.poll()
        if is_late or status == -signal.SIGXCPU:
            return MediaError(f"the image was not decoded within {seconds:.0f} s")
        if status in CRASHES:
            return MediaError("the image file is damaged: it makes its decoder crash")
        return DecoderKilledError("the process that prepared the image was killed; send it again")

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """It is gone afterwards, and all that belongs to it."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # the system may have it wait for a disk
            self._process.wait(_END_S)
        self._channel.close()
