"""Decodes videos in processes of their own (`video_child`), one for each: whatever a file does to its decoder, this
process goes on. Knows nothing of models, nor of where videos come from.

Blocks until the frames are there: call it in a thread.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.errors import OverloadedError, TokenmillError, describe_os_error
from tokenmill_engine.ipc.stopped import StoppedChildren
from tokenmill_server.multimodal.asking import LOOK_UP_S, Check, always
from tokenmill_server.multimodal.errors import CRASHES, DecoderKilledError, MediaError
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_formats import CODEC_NAMES, container_of
from tokenmill_server.multimodal.video_memory import VideoShare
from tokenmill_server.processing.shown import shown

_CHILD = Path(__file__).with_name("video_child.py")
_ENVIRONMENT = frozenset({"LD_LIBRARY_PATH"})
"""What such a process is told of this one's: where the interpreter's own libraries may be, and no more."""
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class VideoFacts:
    """What a video is, known before its frames are decoded. The size is of upright frames, in pixels."""

    width: int
    height: int
    num_frames: int
    fps: float
    """Frames per second, on average."""

    @property
    def duration_s(self) -> float:
        return self.num_frames / self.fps


@dataclass(frozen=True, slots=True)
class FramePlan:
    """Which frames of a video are wanted, and in which size."""

    indices: tuple[int, ...]
    """Ascending; 0 is the first frame."""
    height: int
    width: int
    resample: int
    """Pillow's number of the filter."""


@dataclass(frozen=True, slots=True)
class Frames:
    """Frames of a video, decoded and resized."""

    pixels: NDArray[np.uint8]
    """[num_frames, height, width, 3], RGB."""
    digest: bytes
    """Of the frames as they were decoded, with their sizes."""


def decode_video(
    data: bytes,
    settings: MediaSettings,
    choose: Callable[[VideoFacts], FramePlan],
    share: VideoShare,
    check: Check = always,
) -> Frames:
    """Decodes what `choose` wants of the video `data`, with memory of `share`, which is made to fit. What `choose` and
    `check` raise ends the decoding.

    Raises MediaError for what is no video of a known kind, is damaged, or goes beyond a limit; MoreMemoryError if it
    needs more than `share` has; DecoderKilledError; OverloadedError if no process can be started.
    """
    container = container_of(data)
    with _child(data, container, settings, share.child_bytes) as child:
        facts = VideoFacts(**json.loads(child.read_line(check)))
        plan = choose(facts)
        memory_bytes = share.fit(facts.height * facts.width, (len(plan.indices), plan.height, plan.width))
        child.write_line({"indices": plan.indices, "memory_bytes": memory_bytes, **_size_of(plan)})
        pixels = np.empty((len(plan.indices), plan.height, plan.width, 3), np.uint8)
        child.read_into(pixels.reshape(-1).data, check)
        digest = bytearray(_DIGEST_BYTES)
        child.read_into(memoryview(digest), check)
    return Frames(pixels, bytes(digest))


def _size_of(plan: FramePlan) -> dict[str, int]:
    return {"height": plan.height, "width": plan.width, "resample": plan.resample}


class _Child:
    """The process while it works."""

    def __init__(self, process: subprocess.Popen[bytes], settings: MediaSettings) -> None:
        self._process, self._settings = process, settings
        self._is_late = threading.Event()

    def end_late(self) -> None:
        """The time is up."""
        self._is_late.set()
        self._process.kill()

    def read_line(self, check: Check) -> bytes:
        self._await(check)
        line = _pipe(self._process.stdout).readline()
        if not line.endswith(b"\n"):
            raise self._failure()
        return line

    def write_line(self, command: Mapping[str, Any]) -> None:
        pipe = _pipe(self._process.stdin)
        try:
            pipe.write(json.dumps(command).encode() + b"\n")
            pipe.close()
        except BrokenPipeError:
            raise self._failure() from None

    def read_into(self, view: memoryview, check: Check) -> None:
        pipe = _pipe(self._process.stdout)
        num_read = 0
        while num_read < len(view):
            self._await(check)
            count = pipe.readinto(view[num_read:])  # type: ignore[attr-defined]
            if not count:
                raise self._failure()
            num_read += count

    def _await(self, check: Check) -> None:
        """Until there is something to read, or the end. Raises DecoderKilledError if the process stays stopped."""
        poll = select.poll()
        poll.register(_pipe(self._process.stdout), select.POLLIN)
        stopped = StoppedChildren([self._process.pid])
        check()
        while not poll.poll(LOOK_UP_S * 1000):
            for _, fault in stopped.look():
                raise DecoderKilledError(f"the process that decoded the video {fault}; send it again")
            check()

    def _failure(self) -> TokenmillError:
        """Why the process has ended early."""
        said = _pipe(self._process.stderr).read()
        self._process.wait()
        if self._is_late.is_set() or self._process.returncode == -signal.SIGXCPU:
            return MediaError(
                f"the video was not decoded within {self._settings.video_decode_timeout_s:g} s, the limit that "
                "--video-decode-timeout sets"
            )
        try:
            report = json.loads(said.splitlines()[-1])
        except (IndexError, ValueError):
            if self._process.returncode >= 0:  # not the file's fault: a library is missing
                raise RuntimeError(f"videos cannot be decoded: {said.decode(errors='replace')}") from None
            if self._process.returncode not in CRASHES:
                return DecoderKilledError("the process that decoded the video was killed; send it again")
            report = {}
        return MediaError(_sentence(report, self._settings))


@contextmanager
def _child(data: bytes, container: str, settings: MediaSettings, memory_bytes: int) -> Iterator[_Child]:
    """A process that reads `data`; it is gone at the end. Raises OverloadedError if it cannot be started."""
    limits = {
        "container": container,
        "max_pixels": settings.max_video_pixels,
        "max_duration_s": settings.max_video_duration_s,
        "memory_bytes": memory_bytes,
        "cpu_s": math.ceil(settings.video_decode_timeout_s),
    }
    try:
        process = _start(data, json.dumps(limits))
    except OSError as error:
        raise OverloadedError(f"no process can be started to decode the video: {describe_os_error(error)}") from error
    child = _Child(process, settings)
    timer = threading.Timer(settings.video_decode_timeout_s, child.end_late)
    timer.daemon = True
    with process:
        timer.start()
        try:
            yield child
        finally:
            timer.cancel()
            process.kill()


def _start(data: bytes, limits: str) -> subprocess.Popen[bytes]:
    """Raises OSError, also if there is no memory for a copy of the file."""
    file = os.memfd_create("video", os.MFD_CLOEXEC)
    try:
        _write_all(file, data)
        return subprocess.Popen(
            [sys.executable, "-I", str(_CHILD), str(file), limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=(file,),
            env={name: os.environ[name] for name in _ENVIRONMENT & os.environ.keys()},
        )
    finally:
        os.close(file)


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _sentence(report: Mapping[str, Any], settings: MediaSettings) -> str:
    """What was wrong, for people."""
    match report.get("error"):
        case "pixels":
            return (
                f"the video has frames of {report['width']} x {report['height']} pixels, more than the "
                f"{settings.max_video_pixels} that --max-video-pixels allows"
            )
        case "duration":
            return (
                f"the video is {report['duration_s']:.1f} s long, more than the {settings.max_video_duration_s:g} s "
                "that --max-video-duration allows"
            )
        case "codec":
            return f"the video is encoded as {shown(str(report['codec']))}, which is not supported; {CODEC_NAMES} are"
        case "no_video":
            return "the file has no video in it"
        case "no_frames":
            return "the video is empty: it has no frames"
        case "memory":
            return "the video takes more memory to decode than it may"
        case _:
            return "the video file is damaged or incomplete"
