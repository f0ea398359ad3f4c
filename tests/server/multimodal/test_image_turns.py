"""Images of Pillow's that several threads want at a time."""

import io
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import ExifTags, Image

from tests.support.image_helpers import ASKING, PLAIN, preparer, processor_of
from tests.support.pictures import encoded, noise
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_server.multimodal import image_turns
from tokenmill_server.multimodal.given_video import GivenVideo, resize_frames
from tokenmill_server.multimodal.image_turns import alone_with
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_process import FramePlan

NUM_THREADS = 8


def turned_file() -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return encoded(Image.fromarray(noise(600, 800)), "JPEG", exif=exif)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty")
def test_prompts_that_show_the_same_file() -> None:
    """Nothing of it has been read when they begin."""
    data, images = turned_file(), preparer(processor_of())
    wanted = images.prepare(PLAIN, data, ASKING)
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for _ in range(20):
            image = Image.open(io.BytesIO(data))
            found = [threads.submit(images.prepare, PLAIN, image, ASKING) for _ in range(NUM_THREADS)]
            assert [each.result().key for each in found] == [wanted.key] * NUM_THREADS
    images.close()


@pytest.mark.usefixtures("hasty")
def test_videos_that_have_the_same_frame() -> None:
    data = encoded(noise(300, 400))
    plan = FramePlan((0,), 300, 400, resample=3)

    def resized(image: Image.Image) -> bytes:
        return resize_frames(GivenVideo([image], 1.0, 1), MediaSettings(), lambda _: plan).pixels.tobytes()

    wanted = noise(300, 400).tobytes()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for _ in range(20):
            image = Image.open(io.BytesIO(data))
            found = [threads.submit(resized, image) for _ in range(NUM_THREADS)]
            assert all(each.result() == wanted for each in found)


def test_others_need_not_wait() -> None:
    one, other = (Image.new("RGB", (2, 2)) for _ in range(2))
    order: list[str] = []

    def enter(image: Image.Image, name: str) -> None:
        with alone_with(image):
            order.append(name)

    threads = [threading.Thread(target=enter, args=each) for each in ((one, "one"), (other, "other"))]
    with alone_with(one):
        for thread in threads:
            thread.start()
        threads[1].join(PATIENCE_S)
        assert order == ["other"]
        wait_for(lambda: image_turns._changed._waiters, PATIENCE_S, "a thread that waits")  # type: ignore[attr-defined]
        assert order == ["other"]
    threads[0].join(PATIENCE_S)
    assert order == ["other", "one"]
    assert image_turns._busy == set()
