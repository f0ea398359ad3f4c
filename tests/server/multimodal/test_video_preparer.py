"""What becomes of a video while it is decoded, and of those who want it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.image_helpers import ASKING
from tests.support.processes import children_with
from tests.support.server import PATIENCE_S, wait_for
from tests.support.tiny_media_models import cached_tiny_media_model
from tests.support.videos import moving, video_file, video_url
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.errors import OverloadedError
from tokenmill_server.multimodal import video_process
from tokenmill_server.multimodal.decoding_memory import DecodingMemory
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import VideoSource
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import GIB, MediaSettings
from tokenmill_server.multimodal.video_options import read_video_options
from tokenmill_server.multimodal.video_preparer import VideoPreparer
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.multimodal.wishes import MediaWishes

VIDEO = video_file(moving(4, 48, 64))
WISHES = MediaWishes(VideoReading(4), ProcessorKwargs())
SETTINGS = MediaSettings(loading_threads=4, video_decode_timeout_s=600.0, memory_bytes=3 * GIB)


@pytest.fixture(scope="module")
def videos() -> VideoPreparer:
    folder = cached_tiny_media_model("qwen2_vl")
    media = resolve_model(str(folder)).media
    assert media is not None
    return VideoPreparer(media, read_video_options(Path(folder), media), SETTINGS, 10_000)


@pytest.fixture
def loader(videos: VideoPreparer) -> Iterator[MediaLoader]:
    """It remembers nothing."""
    loader = MediaLoader(None, SETTINGS, PreparedMedia(CachePlacement(Placement.NOWHERE, 0, 0)), videos)
    yield loader
    loader.close()


def dying(monkeypatch: pytest.MonkeyPatch, folder: Path, num_times: int) -> None:
    """From now on so many decoders are killed from outside before they say anything."""
    child, tickets = folder / "child.py", folder / "tickets"
    tickets.mkdir()
    for number in range(num_times):
        (tickets / str(number)).touch()
    child.write_text(
        "import os, pathlib, runpy, signal\n"
        f"for each in pathlib.Path({str(tickets)!r}).iterdir():\n"
        "    each.unlink()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"runpy.run_path({str(video_process._CHILD)!r}, run_name='__main__')\n"
    )
    monkeypatch.setattr(video_process, "_CHILD", child)


def test_a_decoder_that_is_killed(videos: VideoPreparer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The video is decoded once more."""
    memory = DecodingMemory(4 * GIB)
    wanted = videos.prepare(VIDEO, WISHES, memory, ASKING)
    dying(monkeypatch, tmp_path, 1)
    assert videos.prepare(VIDEO, WISHES, memory, ASKING) == wanted
    (tmp_path / "tickets").rmdir()
    dying(monkeypatch, tmp_path, 3)
    with pytest.raises(OverloadedError, match="was killed; send it again"):
        videos.prepare(VIDEO, WISHES, memory, ASKING)
    assert len(list((tmp_path / "tickets").iterdir())) == 1
    assert memory._used == {"image": 0, "video": 0}


def test_who_gives_up_a_video_ends_its_process(
    loader: MediaLoader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it runs, or waits for memory or for a thread."""
    child = tmp_path / "child.py"
    child.write_text("import signal\nsignal.pause()\n")
    monkeypatch.setattr(video_process, "_CHILD", child)
    source, room = VideoSource(video_url(VIDEO), "video"), TokenRoom(10_000, 10_000)

    def num_children() -> int:
        return len(children_with(str(child)))

    async def work() -> None:
        requests = [asyncio.ensure_future(loader.load([source], room)) for _ in range(5)]
        async with asyncio.timeout(PATIENCE_S):
            while num_children() == 0 or len(loader._memory._waiting) == 0:
                await asyncio.sleep(0.001)
        assert num_children() == 1  # there are two threads, and memory for one of the largest videos
        for each in requests:
            each.cancel()
        await asyncio.wait(requests)

    asyncio.run(work())
    wait_for(lambda: num_children() == 0, PATIENCE_S, "the processes have ended")
    wait_for(lambda: loader._memory._used["video"] == 0, PATIENCE_S, "the memory is free")
    assert not loader._memory._waiting
