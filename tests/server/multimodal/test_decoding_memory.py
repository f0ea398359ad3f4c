"""Memory that threads take for their images, and give back."""

import contextlib
import json
import subprocess
import sys
import threading

import pytest

from tests.support.server import PATIENCE_S, wait_for
from tokenmill_server.multimodal.asking import NobodyHasRoomError
from tokenmill_server.multimodal.decoding_memory import DecodingMemory, Kind
from tokenmill_server.multimodal.errors import MediaError


class Item(threading.Thread):
    """Takes memory, and gives it back when told to."""

    def __init__(self, memory: DecodingMemory, num_bytes: int, kind: Kind = "image") -> None:
        super().__init__(daemon=True)
        self._memory, self._num_bytes, self._kind = memory, num_bytes, kind
        self.has_begun, self.may_end, self.is_gone = threading.Event(), threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(NobodyHasRoomError), self._memory.lease(self._kind) as lease:
            lease.take(self._num_bytes, self.check)
            self.has_begun.set()
            self.may_end.wait()

    def check(self) -> None:
        if self.is_gone.is_set():
            raise NobodyHasRoomError

    def end(self) -> None:
        self.may_end.set()
        self.join()


def begun(item: Item) -> bool:
    return item.has_begun.wait(PATIENCE_S)


@pytest.fixture
def memory() -> DecodingMemory:
    return DecodingMemory(100)


def wait_until_waiting(memory: DecodingMemory, count: int) -> None:
    wait_for(lambda: len(memory._waiting) == count, PATIENCE_S, "items that wait")


def test_what_fits_goes_on_at_once(memory: DecodingMemory) -> None:
    images = [Item(memory, size) for size in (50, 30, 20)]
    assert all(map(begun, images))
    late = Item(memory, 1)
    wait_until_waiting(memory, 1)
    assert not late.has_begun.is_set()
    images[2].end()
    assert begun(late)
    for each in (*images, late):
        each.end()


def test_small_ones_do_not_overtake_a_large_one_for_ever(memory: DecodingMemory) -> None:
    first, second = Item(memory, 60), Item(memory, 30)
    assert begun(first)
    assert begun(second)
    large = Item(memory, 80)
    wait_until_waiting(memory, 1)
    small = Item(memory, 10)  # there is room for it
    wait_until_waiting(memory, 2)
    second.end()
    assert not large.has_begun.is_set()
    assert not small.has_begun.is_set()
    first.end()
    assert begun(large)
    assert begun(small)
    large.end()
    small.end()


def test_images_and_videos_share_it(memory: DecodingMemory) -> None:
    image = Item(memory, 60)
    assert begun(image)
    video = Item(memory, 41, "video")
    wait_until_waiting(memory, 1)
    assert not video.has_begun.is_set()
    image.end()
    assert begun(video)
    other = Item(memory, 60)
    wait_until_waiting(memory, 1)
    video.end()
    assert begun(other)
    other.end()


def test_small_images_wait_for_no_video(memory: DecodingMemory) -> None:
    """Neither for those that run, which leave a quarter free, nor for those that wait."""
    running, waiting = Item(memory, 75, "video"), Item(memory, 1, "video")
    assert begun(running)
    wait_until_waiting(memory, 1)
    images = [Item(memory, 20), Item(memory, 5)]
    assert all(map(begun, images))
    late = Item(memory, 1)
    wait_until_waiting(memory, 2)
    running.end()
    assert begun(waiting)
    assert begun(late)
    for each in (*images, waiting, late):
        each.end()


def test_many_images_do_not_keep_a_video_waiting_for_ever(memory: DecodingMemory) -> None:
    first = Item(memory, 50)
    assert begun(first)
    video = Item(memory, 75, "video")
    wait_until_waiting(memory, 1)
    second = Item(memory, 20)  # there is room for it, but images have more than a quarter
    wait_until_waiting(memory, 2)
    assert not second.has_begun.is_set()
    first.end()
    assert begun(video)
    assert begun(second)
    video.end()
    second.end()


def test_one_larger_than_all_is_refused(memory: DecodingMemory) -> None:
    with memory.lease() as image, memory.lease("video") as video:
        with pytest.raises(MediaError, match="the image takes about 1 MiB of memory to decode, more than"):
            image.take(101)
        with pytest.raises(MediaError, match=r"the video takes .* that --max-media-memory leaves to one"):
            video.take(76)
        image.take(100)


def test_who_is_gone_waits_no_longer(memory: DecodingMemory) -> None:
    first = Item(memory, 100)
    assert begun(first)
    gone, late = Item(memory, 100), Item(memory, 1)
    wait_until_waiting(memory, 2)
    gone.is_gone.set()
    gone.join(PATIENCE_S)
    assert not gone.is_alive()
    assert not gone.has_begun.is_set()
    first.end()
    assert begun(late)
    late.end()
    assert is_all_free(memory)


def is_all_free(memory: DecodingMemory) -> bool:
    with memory.lease() as lease:
        return lease.resize(100)


def test_it_is_given_back_whatever_happens(memory: DecodingMemory) -> None:
    for _ in range(3):
        with contextlib.suppress(ValueError), memory.lease() as lease:
            lease.take(90)
            raise ValueError("broken")
    with memory.lease() as lease:
        lease.take(100)
        with pytest.raises(RuntimeError, match="at once"):
            lease.take(1)
    assert is_all_free(memory)


def test_who_needs_less_gives_back_and_who_needs_more_does_not_wait(memory: DecodingMemory) -> None:
    with memory.lease("video") as lease:
        lease.take(70)
        late = Item(memory, 60)
        wait_until_waiting(memory, 1)
        assert not lease.resize(71)  # another was first
        assert lease.resize(40)
        assert begun(late)
        assert not lease.resize(41)
        late.end()
        assert lease.resize(75)
        with pytest.raises(MediaError, match="--max-media-memory"):
            lease.resize(76)
    assert is_all_free(memory)


_DECODING = """
import io, json, os, sys
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from tokenmill_server.multimodal.decode import decode
from tokenmill_server.multimodal.own_process import return_large_blocks

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if json.loads(sys.argv[1]):
    return_large_blocks()
stream = io.BytesIO()
Image.new("RGB", (4000, 4000)).save(stream, "PNG", compress_level=1)
data, kept = stream.getvalue(), []
def work(_):
    with decode(data, 10**8).image:
        kept.append(bytes(3000))  # what is small and stays, behind the pixels in memory
before = resident()
with ThreadPoolExecutor(4) as threads:
    for _ in range(4):
        list(threads.map(work, range(4)))
print(resident() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets glibc")
def test_memory_of_images_is_given_back() -> None:
    """One image has 64 MB of pixels."""

    def kept(is_set: bool) -> int:
        command = [sys.executable, "-c", _DECODING, json.dumps(is_set)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert kept(True) < 48 << 20 < kept(False)
