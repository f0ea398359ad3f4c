"""Memory that threads take for their images, and give back."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from tests.support.server import PATIENCE_S, wait_for
from tokenmill_server.multimodal.decoding_memory import DecodingMemory


class Image(threading.Thread):
    """Takes memory, and gives it back when told to."""

    def __init__(self, memory: DecodingMemory, num_bytes: int) -> None:
        super().__init__(daemon=True)
        self._memory, self._num_bytes = memory, num_bytes
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        with self._memory.lease() as lease:
            lease.take(self._num_bytes)
            self.has_begun.set()
            self.may_end.wait()

    def end(self) -> None:
        self.may_end.set()
        self.join()


def begun(image: Image) -> bool:
    return image.has_begun.wait(PATIENCE_S)


@pytest.fixture
def memory() -> DecodingMemory:
    return DecodingMemory(100)


def waits(memory: DecodingMemory, count: int) -> Callable[[], bool]:
    return lambda: len(memory._waiting) == count


def test_what_fits_goes_on_at_once(memory: DecodingMemory) -> None:
    images = [Image(memory, size) for size in (50, 30, 20)]
    assert all(map(begun, images))
    late = Image(memory, 1)
    wait_for(waits(memory, 1), PATIENCE_S, "images that wait")
    assert not late.has_begun.is_set()
    images[2].end()
    assert begun(late)
    for each in (*images, late):
        each.end()


def test_small_ones_do_not_overtake_a_large_one_for_ever(memory: DecodingMemory) -> None:
    first, second = Image(memory, 60), Image(memory, 30)
    assert begun(first)
    assert begun(second)
    large = Image(memory, 80)
    wait_for(waits(memory, 1), PATIENCE_S, "images that wait")
    small = Image(memory, 10)  # there is room for it
    wait_for(waits(memory, 2), PATIENCE_S, "images that wait")
    second.end()
    assert not large.has_begun.is_set()
    assert not small.has_begun.is_set()
    first.end()
    assert begun(large)
    assert begun(small)
    large.end()
    small.end()


def test_one_larger_than_all_goes_on_alone(memory: DecodingMemory) -> None:
    small = Image(memory, 1)
    assert begun(small)
    huge, other = Image(memory, 10_000), None
    wait_for(waits(memory, 1), PATIENCE_S, "images that wait")
    small.end()
    assert begun(huge)
    other = Image(memory, 1)
    wait_for(waits(memory, 1), PATIENCE_S, "images that wait")
    assert not other.has_begun.is_set()
    huge.end()
    assert begun(other)
    other.end()


def test_it_is_given_back_whatever_happens(memory: DecodingMemory) -> None:
    for _ in range(3):
        with contextlib.suppress(ValueError), memory.lease() as lease:
            lease.take(90)
            raise ValueError("broken")
    with memory.lease() as lease:
        lease.take(100)
        with pytest.raises(RuntimeError, match="at once"):
            lease.take(1)
    assert memory.take(100) == 100


_DECODING = """
import io, json, os, sys
from concurrent.futures import ThreadPoolExecutor
from PIL import Image
from tokenmill_server.multimodal.decode import decode
from tokenmill_server.multimodal.decoding_memory import return_large_blocks

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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and sets glibc")
def test_memory_of_images_is_given_back() -> None:
    """One image has 64 MB of pixels."""

    def kept(is_set: bool) -> int:
        command = [sys.executable, "-c", _DECODING, json.dumps(is_set)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert kept(True) < 48 << 20 < kept(False)
