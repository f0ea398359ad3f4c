"""Memory that threads take for their images, and give back."""

import contextlib
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
