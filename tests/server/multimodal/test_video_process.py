"""Decoding of videos in processes of their own: the right frames, limits, and files that are no videos."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.pictures import encoded, noise
from tests.support.processes import children_with, wait_for_end
from tests.support.video_decoding import SETTINGS, decode
from tests.support.videos import decoded, moving, video_file
from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.ipc import stopped
from tokenmill_server.multimodal import video_memory, video_process
from tokenmill_server.multimodal.decoding_memory import DecodingMemory
from tokenmill_server.multimodal.errors import DecoderKilledError, MediaError
from tokenmill_server.multimodal.video_memory import VideoShare, with_share
from tokenmill_server.multimodal.video_process import FramePlan, Frames, VideoFacts

FRAMES = moving(60, 48, 64)
WANTED = (0, 1, 7, 9, 10, 11, 12, 23, 24, 25, 38, 39, 40, 58, 59)


def read(
    data: bytes, indices: tuple[int, ...] = WANTED, size: tuple[int, int] | None = None, settings: Any = SETTINGS
) -> Frames:
    def choose(facts: VideoFacts) -> FramePlan:
        return FramePlan(indices, *(size or (facts.height, facts.width)), resample=3)

    return decode(data, choose, settings=settings)


@pytest.mark.parametrize(
    ("kind", "codec", "options"),
    [
        ("mp4", "libx264", {"g": "12", "bf": "2"}),
        ("mp4", "libx264", {"x264-params": "open-gop=1:keyint=10:bframes=3"}),
        ("mov", "libx264", {}),
        ("mp4", "libx265", {"x265-params": "open-gop=1:keyint=10:log-level=0"}),
        ("mp4", "mpeg4", {"bf": "2"}),
        ("webm", "libvpx-vp9", {"g": "10"}),
        ("webm", "libvpx", {"g": "10"}),
        ("avi", "mpeg4", {"g": "12", "bf": "2"}),
        ("avi", "mjpeg", {}),
        ("gif", "gif", {}),
        ("mpegts", "libx264", {"g": "12", "bf": "2"}),
        ("mpeg", "mpeg2video", {"g": "12", "bf": "2"}),
    ],
)
def test_the_frames_that_were_asked_for(kind: str, codec: str, options: dict[str, str]) -> None:
    """Exactly what a decoder gives that decodes the whole file, also where key frames are few and frames are not in
    order."""
    data = video_file(FRAMES, kind, codec, **options)
    wanted = decoded(data)
    assert len(wanted) == 60
    facts: list[VideoFacts] = []

    def choose(found: VideoFacts) -> FramePlan:
        facts.append(found)
        return FramePlan(WANTED, found.height, found.width, 3)

    frames = decode(data, choose)
    assert facts == [VideoFacts(64, 48, 60, 10.0)]
    np.testing.assert_array_equal(frames.pixels, [wanted[index] for index in WANTED])


def test_frames_are_resized() -> None:
    data = video_file(FRAMES)
    frames = read(data, (3, 30), (56, 84))
    for got, index in zip(frames.pixels, (3, 30), strict=True):
        wanted = Image.fromarray(decoded(data)[index]).resize((84, 56), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(got, np.asarray(wanted))


def test_the_digest_is_of_decoded_frames() -> None:
    data, other = video_file(FRAMES, "avi", "mjpeg"), video_file(FRAMES[::-1], "avi", "mjpeg")
    same = video_file(FRAMES, "mov", "mjpeg")
    np.testing.assert_array_equal(decoded(same), decoded(data))
    first = read(data, (3, 30))
    assert read(same, (3, 30)).digest == first.digest == read(data, (3, 30), (56, 84)).digest
    assert len({first.digest, read(data, (3, 31)).digest, read(data, (3,)).digest, read(other, (3, 30)).digest}) == 4


def test_a_frame_twice() -> None:
    frames = read(video_file(FRAMES[:1]), (0, 0))
    np.testing.assert_array_equal(frames.pixels[0], frames.pixels[1])


def test_phones_that_were_held_upright() -> None:
    """The file says by how much its frames are turned."""
    data = bytearray(video_file(FRAMES[:4]))
    place = data.index(b"\x40\x00\x00\x00", data.index(b"tkhd")) - 32
    quarter = [0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000]
    data[place : place + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in quarter)
    frames = read(bytes(data), (0, 3))
    assert frames.pixels.shape == (2, 64, 48, 3)
    upright = np.rot90(decoded(bytes(data))[3], -1)
    np.testing.assert_array_equal(frames.pixels[1], upright)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"hello", "no video that can be read; MP4"),
        (encoded(noise(20, 20)), "no video that can be read"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\nfile:///etc/passwd\n", "no video that can be read"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "no video that can be read"),
        (b"\x00\x00\x00\x10ftypisom" + bytes(2000), "damaged or incomplete"),
        (b"\x1a\x45\xdf\xa3" + bytes(2000), "damaged or incomplete"),
        (video_file(FRAMES)[:2000], "damaged or incomplete"),
        (video_file(FRAMES, movflags="faststart")[:5000], "damaged or incomplete"),
        (video_file(FRAMES, "avi", "mjpeg")[:200], "damaged or incomplete|no video in it"),
        (b"GIF89a", "damaged or incomplete"),
    ],
)
def test_files_that_are_no_videos(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read(data, (0,))


def test_sound_alone() -> None:
    with pytest.raises(MediaError, match="has no video in it"):
        read(sound_file(), (0,))


def sound_file() -> bytes:
    stream = io.BytesIO()
    with av.open(stream, "w", format="mp4") as container:
        sound: Any = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        for packet in [*sound.encode(frame), *sound.encode()]:
            container.mux(packet)
    return stream.getvalue()


def test_codecs_that_are_left_out() -> None:
    with pytest.raises(MediaError, match=r"encoded as 'ffv1', which is not supported; H\.264"):
        read(video_file(FRAMES, "matroska", "ffv1"), (0,))


def test_limits() -> None:
    data = video_file(FRAMES)
    assert len(read(data, settings=replace(SETTINGS, max_video_pixels=48 * 64, max_video_duration_s=6.0)).pixels) == 15
    with pytest.raises(MediaError, match=r"frames of 64 x 48 pixels, more than the 3071 that --max-video-pixels"):
        read(data, settings=replace(SETTINGS, max_video_pixels=48 * 64 - 1))
    with pytest.raises(MediaError, match=r"s long, more than the 5 s that --max-video-duration allows"):
        read(data, settings=replace(SETTINGS, max_video_duration_s=5.0))


def test_a_plan_that_is_refused_ends_the_decoding() -> None:
    def choose(facts: VideoFacts) -> FramePlan:
        raise MediaError(f"{facts.num_frames} are too many")

    before = children()
    with pytest.raises(MediaError, match="60 are too many"):
        decode(video_file(FRAMES), choose)
    assert children() == before


def children() -> set[int]:
    return {child.pid for child in children_with("video_child")}


def with_child(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Videos are decoded by another program from now on."""
    path = folder / "child.py"
    path.write_text(program)
    monkeypatch.setattr(video_process, "_CHILD", path)


def test_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_child(monkeypatch, tmp_path, "import signal\nsignal.pause()\n")
    before = children()
    with pytest.raises(MediaError, match=r"not decoded within 0.2 s, the limit that --video-decode-timeout sets"):
        read(video_file(FRAMES), settings=replace(SETTINGS, video_decode_timeout_s=0.2))
    assert children() == before


def test_frames_that_nobody_wants_any_more(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whether the decoder says nothing at all, nothing more, or frame after frame."""
    facts = 'import json; print(json.dumps({"width": 64, "height": 48, "num_frames": 60, "fps": 1.0}), flush=True)\n'
    before = children()
    silence = "import signal\nsignal.pause()\n"
    for program in (silence, facts + silence, facts + "import sys\nwhile True: sys.stdout.buffer.write(bytes(64))\n"):
        with_child(monkeypatch, tmp_path, program)
        asked = []

        def check(asked: list[int] = asked) -> None:
            asked.append(1)
            if len(asked) == 5:
                raise LookupError("nobody is there")

        with pytest.raises(LookupError, match="nobody is there"):
            decode(video_file(FRAMES), lambda _: FramePlan(tuple(range(60)), 1000, 1000, resample=3), check)
        assert children() == before


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGFPE"])
def test_a_decoder_that_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    with_child(monkeypatch, tmp_path, f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    with pytest.raises(MediaError, match="damaged or incomplete"):
        read(video_file(FRAMES))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGUSR1"])
def test_a_decoder_that_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """That is no fault of the file."""
    with_child(monkeypatch, tmp_path, f"import os, signal\nos.kill(os.getpid(), signal.{name})\n")
    with pytest.raises(DecoderKilledError, match="was killed; send it again"):
        read(video_file(FRAMES))


def test_a_decoder_that_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By somebody outside, who may forget it."""
    monkeypatch.setattr(stopped, "STOPPED_S", 1.0)
    with_child(monkeypatch, tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    with pytest.raises(DecoderKilledError, match=r"was stopped .* send it again"):
        read(video_file(FRAMES))


def test_it_is_not_for_a_decoder_to_end() -> None:
    """Signals that a whole group of processes gets are the server's affair."""

    def choose(facts: VideoFacts) -> FramePlan:
        (child,) = children_with("video_child")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
        return FramePlan((0,), facts.height, facts.width, 3)

    assert len(decode(video_file(FRAMES), choose).pixels) == 1


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OverloadedError, match=r"no process can be started to decode the video: .*/nowhere/python"):
        read(video_file(FRAMES))
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_decoder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is no fault of the file."""
    with_child(monkeypatch, tmp_path, "import no_such_library\n")
    with pytest.raises(RuntimeError, match="no_such_library"):
        read(video_file(FRAMES))


@pytest.mark.slow
def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file cannot make its decoder take more than the limits leave it."""
    data = video_file(moving(3, 1024, 1024))
    monkeypatch.setattr(video_memory, "_FRAMES_IN_DECODER", 0)
    monkeypatch.setattr(video_memory, "_BYTES_PER_RESIZED_PIXEL", 0)
    assert read(data, (0,), (16, 16)).pixels.shape == (1, 16, 16, 3)
    with pytest.raises(MediaError, match="takes more memory to decode than it may"):
        read(data, (0,), (8192, 8192))
    monkeypatch.undo()
    assert read(data, (0,), (8192, 8192)).pixels.shape == (1, 8192, 8192, 3)


def test_a_process_may_take_what_its_video_has() -> None:
    """All memory of videos is less than the largest of them might need."""
    limits: list[int] = []

    def choose(facts: VideoFacts) -> FramePlan:
        (child,) = children_with("video_child")
        limits.append(child.rlimit(psutil.RLIMIT_AS)[0])
        return FramePlan((0,), facts.height, facts.width, 3)

    data = video_file(FRAMES)
    for num_gib in (4, 1):
        decode(data, choose, settings=replace(SETTINGS, memory_bytes=num_gib * 2**30))
    assert 2**30 < limits[0] < 3 * 2**30
    assert limits[1] < 2**30
    with pytest.raises(MediaError, match=r"the video takes about 193 MiB .* 150 MiB that --max-media-memory leaves"):
        decode(data, choose, settings=replace(SETTINGS, memory_bytes=200 * 2**20))
    assert len(limits) == 2


def test_a_video_that_takes_more_than_was_thought(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again when there is as much, and holds nothing until then."""
    memory, held = DecodingMemory(4 * 2**30), contextlib.ExitStack()
    held.enter_context(memory.lease()).take(2 * 2**30)
    data, num_begun = video_file(FRAMES), 0

    def work(share: VideoShare) -> int:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 2:
            assert not memory._waiting
        return share.fit(48 * 64, (60, 2000, 2000))

    def check() -> None:
        assert num_begun == 1
        assert memory._used == {"image": 2 * 2**30, "video": 0}
        held.close()

    assert with_share(memory, len(data), 48 * 64, work, check) < 2**30
    assert num_begun == 2


def test_it_ends_with_the_server() -> None:
    """Even if that is killed while a video is decoded."""
    program = (
        "import sys, time\n"
        "from tests.server.multimodal.test_video_process import FRAMES, decode, video_file\n"
        "def choose(facts):\n"
        "    print('decoding', flush=True)\n"
        "    time.sleep(600)\n"
        "decode(video_file(FRAMES), choose)\n"
    )
    path = os.pathsep.join(sys.path)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"decoding\n"
    (child,) = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for_end(child)


def test_several_at_a_time() -> None:
    data = [video_file(moving(20, 48, 64, seed)) for seed in range(6)]
    wanted = [decoded(each)[11] for each in data]
    results: dict[int, Frames] = {}

    def work(index: int) -> None:
        results[index] = read(data[index], (11,))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, frame in enumerate(wanted):
        np.testing.assert_array_equal(results[index].pixels[0], frame)


def test_this_process_needs_no_decoder() -> None:
    program = "import sys, tokenmill_server.multimodal.video_process as each\nassert 'av' not in sys.modules\n"
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": path})
