"""Messages through shared memory: everything arrives once and in order, whoever is slow; nobody waits in a loop."""

import contextlib
import hashlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.server import wait_for
from tokenmill_engine.ipc.shared_ring import RingFiles, RingReader, RingWriter, create_ring, wake_up

DEADLINE_S = 60.0


@contextlib.contextmanager
def a_ring(num_readers: int, capacity: int) -> Iterator[tuple[RingFiles, RingWriter]]:
    files = create_ring(num_readers, capacity)
    writer = RingWriter(files.memory, files.wakes, files.space)
    yield files, writer
    writer.close()
    files.close()


@contextlib.contextmanager
def readers_of(files: RingFiles, num_readers: int) -> Iterator[list[RingReader]]:
    readers = [RingReader(*files.of_reader(index), index) for index in range(num_readers)]
    yield readers
    for reader in readers:
        reader.close()


@contextlib.contextmanager
def peer(
    mode: str, files: RingFiles, index: int = 0, echo: RingFiles | None = None
) -> Iterator["subprocess.Popen[str]"]:
    """A reader in a process of its own that has begun to read."""
    fds = [*files.of_reader(index), *(echo.of_reader(0) if echo is not None else ())]
    arguments = [*files.of_reader(index), index, *(echo.of_reader(0) if echo is not None else ())]
    command = [sys.executable, "-m", "tests.support.ring_peer", mode, *map(str, arguments)]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reading\n"
            yield process
        finally:
            process.kill()


def some_messages(seed: int, count: int, longest: int) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(source.choice((1, 15, 16, 17, source.randint(1, longest)))) for _ in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [32, 4096])
def test_every_process_reads_everything_in_order(capacity: int) -> None:
    """Messages of up to three times the ring, around its end many times, and a reader that is held up."""
    messages = some_messages(capacity, 1500, 3 * capacity)
    expected = f"{len(messages)} {hashlib.sha256(b''.join(messages)).hexdigest()}\n"
    with a_ring(3, capacity) as (files, writer), contextlib.ExitStack() as stack:
        processes = [stack.enter_context(peer("digest", files, index)) for index in range(3)]
        slow = psutil.Process(processes[1].pid)
        slow.suspend()
        sender = threading.Thread(target=lambda: [writer.send(message) for message in [*messages, b""]])
        sender.start()
        assert sender.is_alive()
        slow.resume()
        sender.join(DEADLINE_S)
        assert not sender.is_alive()
        assert [process.communicate(timeout=DEADLINE_S)[0] for process in processes] == [expected] * 3


@pytest.mark.slow
def test_no_wake_up_is_lost() -> None:
    """Both sides sleep before every message; one lost wake-up would be the end of it."""
    with (
        a_ring(1, 4096) as (there, writer),
        a_ring(1, 4096) as (back, _),
        readers_of(back, 1) as (reader,),
        peer("echo", there, echo=back) as process,
    ):
        watchdog = threading.Timer(DEADLINE_S, process.kill)
        watchdog.start()
        died = threading.Thread(target=lambda: (process.wait(), wake_up(back.wakes[0])))
        died.start()
        for number in range(20_000):
            message = number.to_bytes(4, "little")
            writer.send(message)
            while (answer := reader.take()) is None:
                assert process.returncode is None, f"message {number} was never answered"
                reader.wait()
            assert answer == message
        watchdog.cancel()
        writer.send(b"")
        died.join(DEADLINE_S)


@given(st.integers(2, 8).map(lambda n: 16 * n), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3))))
def test_whatever_is_written_is_read(capacity: int, steps: list[tuple[int, int]]) -> None:
    """Messages of any length, 0 too; between two of them each of two readers takes as often as it likes."""
    expected: list[deque[bytes]] = [deque(), deque()]
    with a_ring(2, capacity) as (files, writer), readers_of(files, 2) as readers:

        def take(index: int) -> bool:
            message = readers[index].take()
            if message is not None:
                assert message == expected[index].popleft()
            return message is not None

        for number, (length, takes) in enumerate(steps):
            message = bytes((number + offset) % 251 for offset in range(length))
            for queue in expected:
                queue.append(message)
            writer.send(message, while_full=lambda: (take(0), take(1), None)[-1])
            for _ in range(takes):
                take(number % 2)
        for index, queue in enumerate(expected):
            while queue:
                take(index)
            assert readers[index].take() is None


def test_the_slowest_reader_decides_when_there_is_space() -> None:
    with a_ring(2, 64) as (files, writer), readers_of(files, 2) as (quick, slow):
        asked = 0

        def while_full() -> None:
            nonlocal asked
            asked += 1
            assert quick.take() is None or asked == 1
            if asked > 5:
                slow.take()

        writer.send(b"a" * 40)
        writer.send(b"b" * 20, while_full)
        assert asked == 6
        assert quick.take() == b"b" * 20
        assert slow.take() == b"b" * 20


def test_who_waits_for_space_sleeps_until_there_is_some() -> None:
    with a_ring(1, 64) as (files, writer), readers_of(files, 1) as (reader,):
        writer.send(b"x" * 48)
        done = threading.Event()
        sender = threading.Thread(target=lambda: (writer.send(b"y" * 300), done.set()))
        sender.start()
        assert not done.wait(0.05)
        assert reader.receive() == b"x" * 48
        assert reader.receive() == b"y" * 300
        assert done.wait(DEADLINE_S)
        sender.join()


def test_a_signal_does_not_end_the_wait() -> None:
    """Its handler runs at once, and the wait goes on."""
    with a_ring(1, 64) as (files, writer), readers_of(files, 1) as (reader,):
        previous = signal.signal(signal.SIGALRM, lambda _number, _frame: handled.append(time.monotonic()))
        handled: list[float] = []
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            sender = threading.Thread(
                target=lambda: (wait_for(lambda: handled, DEADLINE_S, "a signal"), writer.send(b"after it"))
            )
            sender.start()
            assert reader.receive() == b"after it"
            sender.join()
        finally:
            signal.signal(signal.SIGALRM, previous)


@pytest.mark.slow
def test_who_waits_for_messages_costs_nothing() -> None:
    with a_ring(1, 4096) as (files, writer), peer("digest", files) as process:
        writer.send(b"one")
        reader = psutil.Process(process.pid)

        def cpu_s_in_a_second() -> float:
            before = sum(reader.cpu_times()[:2])
            time.sleep(1.0)
            return sum(reader.cpu_times()[:2]) - before

        assert min(cpu_s_in_a_second() for _ in range(3)) < 0.03


def test_the_writer_gives_up_when_it_is_told_that_a_reader_is_gone() -> None:
    with a_ring(1, 4096) as (files, writer), peer("still", files) as process:
        pidfd = os.pidfd_open(process.pid)
        poller = select.poll()
        for fd in (pidfd, files.space):
            poller.register(fd, select.POLLIN)

        def while_full() -> None:
            process.kill()
            if any(fd == pidfd for fd, _ in poller.poll(DEADLINE_S * 1000)):
                raise ChildProcessError("the reader is gone")

        with pytest.raises(ChildProcessError):
            writer.send(b"x" * 10_000, while_full)
        os.close(pidfd)


def test_of_a_writer_that_died_in_a_message_nothing_comes_out() -> None:
    with a_ring(1, 64) as (files, writer), readers_of(files, 1) as (reader,):

        def die() -> None:
            raise KeyboardInterrupt

        writer.send(b"whole")
        with pytest.raises(KeyboardInterrupt):
            writer.send(b"x" * 1000, while_full=die)
        assert reader.take() == b"whole"
        assert reader.take() is None
        wake_up(files.wakes[0])
        reader.wait()
        assert reader.take() is None


def test_what_no_writer_wrote_is_noticed() -> None:
    with a_ring(1, 64) as (files, writer), readers_of(files, 1) as (reader,):
        other = RingWriter(files.memory, files.wakes, files.space)
        writer.send(b"one")
        assert reader.take() == b"one"
        other.send(b"x" * 40)
        with pytest.raises(RuntimeError, match="message 1 was expected in the ring, not"):
            reader.take()
        other.close()


def test_one_eventfd_may_wake_the_reader_of_several_rings() -> None:
    wake = os.eventfd(0, os.EFD_CLOEXEC)
    rings = [create_ring(1, 64, wake) for _ in range(2)]
    writers = [RingWriter(ring.memory, ring.wakes, ring.space) for ring in rings]
    readers = [RingReader(*ring.of_reader(0)) for ring in rings]
    writers[1].send(b"from the second")
    readers[0].wait()
    assert [reader.take() for reader in readers] == [None, b"from the second"]
    for each in (*writers, *readers, *rings):
        each.close()
    os.close(wake)  # it was not the rings' to close


@pytest.mark.parametrize(("num_readers", "capacity"), [(0, 64), (512, 64), (1, 16), (1, 72)])
def test_impossible_rings_are_refused(num_readers: int, capacity: int) -> None:
    with pytest.raises(ValueError, match=r"readers|multiple"):
        create_ring(num_readers, capacity)


def test_nothing_is_left_of_rings() -> None:
    def traces() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), maps.read().count("tokenmill-ring")

    before = traces()
    for _ in range(20):
        with a_ring(2, 4096) as (files, writer), readers_of(files, 2) as readers:
            writer.send(b"x" * 100)
            assert [reader.take() for reader in readers] == [b"x" * 100] * 2
            assert traces() != before
    wait_for(lambda: traces() == before, DEADLINE_S, "everything to be closed")
