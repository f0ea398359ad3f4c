"""A program of its own that decodes one video for an API server, so that nothing a file does reaches the server.

Started by `video_process` with its path, never imported by the server: a decoder that crashes, hangs or takes all
memory ends with this process. It knows the standard library, PyAV, Pillow and blake3, and nothing of models.

Arguments: the file descriptor that the file can be read from, and the limits as JSON (`Limits`). What goes in and out:
one line of JSON out, with what the video is; one line of JSON in, with the frames that are wanted and the memory that
there is for them; those frames out, as RGB in the size wanted, and behind them 32 bytes, the blake3 digest of the
frames as they were decoded. A failure is one line of JSON on the standard error output, and exit status 1.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from blake3 import blake3
from PIL import Image

_CODECS = ("av1", "gif", "h264", "hevc", "libdav1d", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4", "vp8", "vp9")
"""FFmpeg's names of the decoders that may run. Others are old or rare, and less looked after."""
_PR_SET_PDEATHSIG = 1
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}


class VideoError(Exception):
    """What is wrong with the video: a code that `video_process` has a sentence for, and the numbers in it."""

    def __init__(self, code: str, **values: Any) -> None:
        super().__init__(code)
        self.report = {"error": code, **values}


@dataclass(frozen=True, slots=True)
class Limits:
    """What a video may be, and this process may take."""

    container: str
    """FFmpeg's name of the kind of file: nothing else is tried."""
    max_pixels: int
    """Of a frame."""
    max_duration_s: float
    memory_bytes: int
    """Address space, beside what the libraries take that are loaded by then."""
    cpu_s: int


class Packets:
    """Where the frames of a video stand in its file, found without decoding any.

    Frames are numbered in the order they are shown. Decoders can start at key frames alone, so a run of packets from
    one key frame to the next is decoded as a whole or not at all.
    """

    def __init__(self) -> None:
        self._times = array("q")
        self._runs = array("q")
        """Of each packet, the number of the key frame that it follows."""
        self._starts: list[int] = []
        """Time of each key frame."""
        self._shown: list[int] = []
        self.has_times = True
        """Whether frames can be told by their times. Files that do not say when frames are shown have them in order."""

    def add(self, packet: "Packet[VideoStream]") -> None:
        """The next packet in the file."""
        time = packet.pts
        if time is None:
            self.has_times, time = False, 0
        if packet.is_keyframe or not self._starts:
            self._starts.append(time)
        self._times.append(time)
        self._runs.append(len(self._starts) - 1)
        if not packet.is_discard:
            self._shown.append(time)

    def finish(self) -> list[int]:
        """All have been added. The times of the frames, ascending; without times, their numbers."""
        times = sorted(self._shown)
        self.has_times = self.has_times and len(set(times)) == len(times)
        return times if self.has_times else list(range(len(times)))

    def runs_of(self, times: set[int]) -> set[int]:
        """The runs to decode for the frames at `times`. A frame shown before the key frame that it follows in the file
        may also need the run before."""
        wanted: set[int] = set()
        for time, run in zip(self._times, self._runs, strict=True):
            if time in times:
                wanted.add(run)
                if time < self._starts[run] and run:
                    wanted.add(run - 1)
        return wanted


class Video:
    """One file."""

    def __init__(self, file: BinaryIO, limits: Limits) -> None:
        self._file, self._limits = file, limits
        self._options = {
            "protocol_whitelist": "none",
            "format_whitelist": limits.container,
            "codec_whitelist": ",".join(_CODECS),
        }
        self._container: InputContainer | None = None
        self._packets = Packets()
        self._times: list[int] = []

    def facts(self) -> dict[str, Any]:
        """Size and number of the frames. Decodes the first alone."""
        container, stream = self._open()
        if container.duration is not None:
            self._check_duration(container.duration / av.time_base)
        start: int | None = None
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            if packet.is_corrupt:
                raise VideoError("damaged")
            self._packets.add(packet)
            if packet.pts is not None and packet.time_base is not None:
                start = packet.pts if start is None else min(start, packet.pts)
                self._check_duration(float((packet.pts - start) * packet.time_base))
        self._times = self._packets.finish()
        rate = stream.average_rate or stream.guessed_rate
        if not self._times or not rate or rate < 0:
            raise VideoError("no_frames")
        if not self._packets.has_times:
            self._check_duration(len(self._times) / float(rate))
        first = next(self.frames([0]))
        return {
            "width": first.width,
            "height": first.height,
            "num_frames": len(self._times),
            "fps": float(rate),
        }

    def frames(self, indices: list[int]) -> Iterator[Image.Image]:
        """The frames with these numbers, ascending, upright and in RGB. Runs that hold none are not decoded."""
        wanted = [self._times[index] for index in indices]
        num_done, image = 0, None
        for number, frame in enumerate(self._decoded(self._packets.runs_of(set(wanted)))):
            time = frame.pts if self._packets.has_times else number
            if time is None or time < wanted[num_done]:
                continue
            image = self._image(frame)
            while num_done < len(wanted) and time >= wanted[num_done]:
                yield image
                num_done += 1
            if num_done == len(wanted):
                return
        # The last packet may belong to a frame that was shown before, as the second half of an interlaced one.
        if image is None or wanted[num_done] != wanted[-1]:
            raise VideoError("damaged")
        yield from [image] * (len(wanted) - num_done)

    def _open(self) -> tuple[InputContainer, VideoStream]:
        """At the beginning of the file."""
        if self._container is not None:
            self._container.close()
        self._file.seek(0)
        container = av.open(
            self._file,
            "r",
            format=self._limits.container,
            container_options=self._options,
            metadata_errors="ignore",
        )
        self._container = container
        streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
        if not streams:
            raise VideoError("no_video")
        context = streams[0].codec_context
        if context.codec.name not in _CODECS:
            raise VideoError("codec", codec=context.codec.canonical_name)
        self._check_size(context.width, context.height)
        context.thread_count = 1
        context.options = {"max_pixels": str(self._limits.max_pixels)}
        return container, streams[0]

    def _decoded(self, runs: set[int]) -> Iterator[VideoFrame]:
        """The frames of these runs; of all, if frames must be counted."""
        container, stream = self._open()
        run, was_fed, last = -1, False, max(runs)
        for packet in container.demux(stream):
            if packet.size == 0:
                continue
            run += packet.is_keyframe or run < 0
            is_fed = run in runs or not self._packets.has_times
            if was_fed and not is_fed:
                yield from stream.codec_context.decode(None)
                stream.codec_context.flush_buffers()
                if run > last:
                    return
            if is_fed:
                yield from packet.decode()
            was_fed = is_fed
        yield from stream.codec_context.decode(None)

    def _image(self, frame: VideoFrame) -> Image.Image:
        if frame.is_corrupt:
            raise VideoError("damaged")
        self._check_size(frame.width, frame.height)
        image: Image.Image = frame.to_image()  # type: ignore[no-untyped-call]
        turn = _TURNS.get(frame.rotation % 360)
        return image if turn is None else image.transpose(turn)

    def _check_size(self, width: int, height: int) -> None:
        if width < 1 or height < 1:
            raise VideoError("damaged")
        if width * height > self._limits.max_pixels:
            raise VideoError("pixels", width=width, height=height)

    def _check_duration(self, seconds: float) -> None:
        if seconds > self._limits.max_duration_s:
            raise VideoError("duration", duration_s=seconds)


def serve(video: Video, commands: BinaryIO, replies: BinaryIO, num_own_bytes: int) -> None:
    """Tells what the video is, and gives the frames that are asked for. `num_own_bytes`: as `own_bytes`."""
    replies.write(json.dumps(video.facts()).encode() + b"\n")
    replies.flush()
    line = commands.readline()
    if not line:  # nobody wants any
        return
    plan = json.loads(line)
    limit_memory(num_own_bytes + plan["memory_bytes"])
    size, resample = (plan["width"], plan["height"]), Image.Resampling(plan["resample"])
    hasher = blake3()
    for image in video.frames(plan["indices"]):
        pixels = image.tobytes()
        hasher.update(f"{image.width}x{image.height};".encode())
        hasher.update(pixels)
        replies.write(pixels if image.size == size else image.resize(size, resample).tobytes())
    replies.write(hasher.digest())
    replies.flush()


def own_bytes() -> int:
    """Address space of this process now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def limit_memory(num_bytes: int) -> None:
    """No more address space than that, or than holds for all of this process's life."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(
        resource.RLIMIT_AS, (num_bytes if most == resource.RLIM_INFINITY else min(num_bytes, most), most)
    )


def confine(limits: Limits) -> None:
    """This process ends with its parent, and takes no more than it may. Signals that a whole group of processes gets
    are the parent's affair."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))


def main() -> int:
    """Exit status: 0, or 1 with the reason on the standard error output."""
    limits = Limits(**json.loads(sys.argv[2]))
    confine(limits)
    num_own_bytes = own_bytes()
    limit_memory(num_own_bytes + limits.memory_bytes)
    av.logging.set_level(av.logging.PANIC)
    try:
        with open(int(sys.argv[1]), "rb") as file:
            serve(Video(file, limits), sys.stdin.buffer, sys.stdout.buffer, num_own_bytes)
    except VideoError as failure:
        report = failure.report
    except BrokenPipeError:
        report = {"error": "unwanted"}
    except Exception as error:  # decoders raise whatever broken data make them stumble over
        lacks_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        report = {"error": "memory" if lacks_memory else "damaged"}
    else:
        return 0
    sys.stderr.write(json.dumps(report) + "\n")
    sys.stderr.flush()
    return 1


if __name__ == "__main__":
    # Nothing is closed in order: what a decoder holds may be broken, and goes with the process.
    os._exit(main())
