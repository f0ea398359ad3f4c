"""Processes that share objects and are killed at any moment: nobody reads what is wrong, nobody else ends, and the
memory goes with the last of them."""

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support.server import PATIENCE_S
from tests.support.shared_media import segment, segments_of
from tokenmill_engine.ipc.shared_objects import SEGMENT_HEAD

pytestmark = pytest.mark.slow

NUM_GRAINS = 48
"""Of which the largest objects take eleven: with three that are held there is always room for another."""
NUM_WRITERS = 25


@contextlib.contextmanager
def peer(what: str, memory: int, pipe: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.support.object_peer", what, str(memory), str(pipe)]
    with subprocess.Popen(command, pass_fds=(memory, pipe), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def writer_of(memory: int) -> bytes:
    return os.pread(memory, SEGMENT_HEAD.size, 0)


def wait_for_another_writer(memory: int, before: bytes) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while writer_of(memory) == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_writers_and_readers_are_killed_at_any_moment() -> None:
    source = random.Random(0)
    with segment(NUM_GRAINS) as memory, contextlib.ExitStack() as stack:
        pipe_end, pipe = os.pipe()
        reader = stack.enter_context(peer("read", memory, pipe_end))
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        for _ in range(NUM_WRITERS):
            before = writer_of(memory)
            with peer("write", memory, pipe) as writer, peer("read", memory, pipe_end) as other:
                wait_for_another_writer(memory, before)
                # How far both have come does not matter, as long as it is not always equally far.
                time.sleep(source.uniform(0.0, 0.2))
                other.kill()
                writer.kill()
        os.close(pipe)
        os.close(pipe_end)
        counts, _ = reader.communicate(timeout=PATIENCE_S)
        num_found, num_missing, num_wrong = map(int, counts.split())
        assert num_wrong == 0
        assert num_found > NUM_WRITERS
        assert num_missing > 0
        assert reader.returncode == 0


def test_the_memory_goes_with_the_last_process() -> None:
    """A writer that nobody has asked to end, and no one else has the descriptor any more."""
    pipe_end, pipe = os.pipe()
    with segment(NUM_GRAINS) as memory:
        inode = os.fstat(memory).st_ino
        with peer("write", memory, pipe) as writer, peer("read", memory, pipe_end) as reader:
            wait_for_another_writer(memory, bytes(SEGMENT_HEAD.size))
            assert inode in segments_of(writer.pid)
            assert inode in segments_of(reader.pid)
    os.close(pipe)
    os.close(pipe_end)
    assert all(inode not in segments_of(int(each)) for each in os.listdir("/proc") if each.isdigit())
