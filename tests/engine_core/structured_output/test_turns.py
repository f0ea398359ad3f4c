"""Who is compiled when."""

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.support.grammars import spec
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.errors import NotBegunError
from tokenmill_engine.messages import StructuredSpec
from tokenmill_engine.structured_output import turns as turns_module
from tokenmill_engine.structured_output.turns import Turns

ORDINARY, SLOW, HOSTILE = "ordinary", "slow", "hostile"


def named(kind: str, number: int = 0) -> StructuredSpec:
    return spec("regex", f"{kind} {number}")


class Work:
    """Long turns wait for `release`, and short ones for `release_short` if `holds_short`."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self.sent_away: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.release, self.release_short = threading.Semaphore(0), threading.Semaphore(0)
        self.holds_short = False
        self.turns = Turns(self.take_turn, lambda spec: self.sent_away.put(spec.text))

    def take_turn(self, spec: StructuredSpec, is_long: bool) -> bool:
        self.begun.put((spec.text, is_long))
        if is_long:
            self.release.acquire()
        elif self.holds_short:
            self.release_short.acquire()
        return spec.text.startswith(ORDINARY) or (is_long and spec.text.startswith(SLOW))

    def next(self) -> tuple[str, bool]:
        return self.begun.get(timeout=PATIENCE_S)

    def has_long(self, number: int) -> bool:
        """Whether so many wait for a long turn."""
        return len(self.turns._long) == number


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Work]]:
    made: list[Work] = []

    def make(num_cpus: int = 2) -> Work:
        monkeypatch.setattr(turns_module, "usable_cpus", lambda: num_cpus)
        made.append(Work())
        return made[-1]

    yield make
    for work in made:
        work.release.release(100)
        work.release_short.release(100)
        work.turns.close()


@pytest.mark.parametrize(("num_cpus", "max_long"), [(1, 1), (2, 1), (3, 2), (64, 3)])
def test_long_turns_leave_room_for_short_ones(make: Callable[..., Work], num_cpus: int, max_long: int) -> None:
    work = make(num_cpus)
    for number in range(6):
        work.turns.join(named(SLOW, number))
    begun = [work.next() for _ in range(6 + max_long)]
    assert {name for name, is_long in begun if not is_long} == {f"slow {number}" for number in range(6)}
    wait_for(lambda: work.has_long(6 - max_long), PATIENCE_S, "the others to wait")
    for number in range(5):
        work.turns.join(named(ORDINARY, number))
    assert {work.next() for _ in range(5)} == {(f"ordinary {number}", False) for number in range(5)}
    work.release.release()
    assert work.next()[1], "the next one's turn"


def test_while_others_wait_for_short_turns_there_is_one_long_one(make: Callable[..., Work]) -> None:
    work = make(num_cpus=64)
    work.holds_short = True
    for each in (*(named(SLOW, number) for number in range(4)), *(named(ORDINARY, number) for number in range(9))):
        work.turns.join(each)
    assert {work.next() for _ in range(4)} == {(f"slow {number}", False) for number in range(4)}
    work.release_short.release(4)
    following = [work.next() for _ in range(4)]
    assert sum(is_long for _, is_long in following) == 1
    work.release_short.release(9)
    assert sum(is_long for _, is_long in [work.next() for _ in range(8)]) == 2


def test_they_wait_for_a_long_turn_that_may_be_of_use(
    make: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: on a busy machine that says nothing of what comes of it."""
    work, since = make(), time.monotonic()
    for number in range(2):
        work.turns.join(named(SLOW, number))
    assert sum(is_long for _, is_long in [work.next() for _ in range(3)]) == 1
    wait_for(lambda: work.has_long(1), PATIENCE_S, "the other one to wait")
    monkeypatch.setattr(time, "monotonic", lambda: since + 3600)
    work.turns.join(named(ORDINARY))
    assert work.next() == ("ordinary 0", False)
    work.release.release()
    assert work.next()[1]
    assert work.sent_away.empty()


@pytest.mark.parametrize(("num_cpus", "max_long"), [(1, 1), (64, 3)])
def test_those_behind_more_turns_in_vain_than_there_are_at_once_are_sent_away(
    make: Callable[..., Work], num_cpus: int, max_long: int
) -> None:
    work = make(num_cpus)
    many = [named(HOSTILE, number) for number in range(2 * max_long)]
    for each in many:
        work.turns.join(each)
    for _ in range(3 * max_long):
        work.next()
    wait_for(lambda: work.has_long(max_long), PATIENCE_S, "the others to wait")
    for number in range(2):
        work.turns.join(named(SLOW, number))
        assert work.next() == (f"slow {number}", False)
    wait_for(lambda: work.has_long(max_long + 2), PATIENCE_S, "those as well")
    work.release.release(max_long)
    assert all(is_long for _, is_long in [work.next() for _ in range(max_long)])
    wait_for(lambda: work.has_long(2), PATIENCE_S, "as many in vain as there are at once")
    assert work.sent_away.empty()
    work.release.release()
    assert [work.sent_away.get(timeout=PATIENCE_S) for _ in range(2)] == ["slow 0", "slow 1"]


def test_a_turn_of_use_lets_the_others_wait_on(make: Callable[..., Work]) -> None:
    """And who comes later has not seen those in vain."""
    work = make()
    kinds = [HOSTILE, SLOW, HOSTILE, HOSTILE, SLOW]
    for number, kind in enumerate(kinds):
        work.turns.join(named(kind, number))
        assert work.next() == (f"{kind} {number}", False)
        if number == 0:
            assert work.next() == ("hostile 0", True)
        wait_for(lambda number=number: work.has_long(number), PATIENCE_S, "it to wait")
    for number, kind in [*enumerate(kinds)][1:4]:
        work.release.release()
        assert work.next() == (f"{kind} {number}", True)
    work.turns.join(named(SLOW, 5))
    assert work.next() == ("slow 5", False)
    wait_for(lambda: work.has_long(2), PATIENCE_S, "it to wait")
    work.release.release()
    assert work.sent_away.get(timeout=PATIENCE_S) == "slow 4"
    assert work.next() == ("slow 5", True)


def test_who_leaves_has_no_turn(make: Callable[..., Work]) -> None:
    work = make()
    work.holds_short = True
    for number in range(5):
        work.turns.join(named(SLOW, number))
    assert sorted(work.next() for _ in range(4)) == [(f"slow {number}", False) for number in range(4)]
    assert work.turns.leave(named(SLOW, 4))
    work.release_short.release(4)
    assert work.next()[1]
    wait_for(lambda: work.has_long(3), PATIENCE_S, "the others to wait for a long turn")
    waiting = [*work.turns._long]
    assert all(work.turns.leave(each) for each in waiting)
    assert not any(work.turns.leave(named(SLOW, number)) for number in range(4)), "one has its long turn"
    work.release.release()
    work.turns.join(named(ORDINARY))
    work.release_short.release()
    assert work.next() == ("ordinary 0", False)


def test_who_leaves_in_a_short_turn_has_no_long_one(make: Callable[..., Work]) -> None:
    """Unless somebody comes back meanwhile: then it is the same turn, not another one."""
    work = make()
    work.holds_short = True
    for number in range(2):
        work.turns.join(named(SLOW, number))
        assert work.next() == (f"slow {number}", False)
        assert work.turns.leave(named(SLOW, number))
    work.turns.join(named(SLOW, 1))
    work.release_short.release(3)
    assert work.next() == ("slow 1", True)
    work.turns.join(named(ORDINARY))
    assert work.next() == ("ordinary 0", False)
    work.release.release()
    wait_for(lambda: work.turns._num_idle == len(work.turns._threads), PATIENCE_S, "all to be done")
    assert work.begun.empty()


def test_no_thread_rests_while_there_is_something_to_do(make: Callable[..., Work]) -> None:
    """Whatever order they come, leave and end in."""
    chance, work = random.Random(0), make(num_cpus=64)
    work.holds_short = True
    turns = work.turns

    def is_busy() -> bool:
        with turns._changed:
            may_begin = turns._short or (turns._long and turns._num_long < 3)
            return not may_begin or turns._num_idle == 0

    for number in range(300):
        for _ in range(chance.randint(1, 3)):
            chance.choice((work.release, work.release_short)).release()
        turns.join(named(chance.choice((ORDINARY, SLOW, SLOW)), number))
        turns.leave(named(SLOW, number - chance.randint(1, 9)))
        wait_for(is_busy, PATIENCE_S, "a thread to begin", poll_s=0.001)


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


def test_where_no_thread_can_be_had_the_next_one_tries_again(
    make: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make()
    with monkeypatch.context() as patch:
        without_threads(patch)
        with pytest.raises(NotBegunError, match="can't start new thread") as raised:
            work.turns.join(named(ORDINARY, 0))
    assert raised.value.retry_after_s == 1
    work.turns.join(named(ORDINARY, 1))
    assert work.next() == ("ordinary 1", False), "the first one does not wait"
    wait_for(lambda: work.turns._num_idle == 1, PATIENCE_S, "it to end")
    assert work.begun.empty()


def test_where_no_more_threads_can_be_had_one_does_all(
    make: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make()
    work.holds_short = True
    work.turns.join(named(ORDINARY, 0))
    without_threads(monkeypatch)
    for number in (1, 2):
        work.turns.join(named(ORDINARY, number))
    work.release_short.release(3)
    assert [work.next() for _ in range(3)] == [(f"ordinary {number}", False) for number in range(3)]
    assert len(work.turns._threads) == 1


def test_they_give_way(make: Callable[..., Work]) -> None:
    """To steps, which other threads of the process may compute."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    work = make()
    work.turns.join(named(SLOW))
    assert [work.next() for _ in range(2)][1] == ("slow 0", True)
    (thread,) = work.turns._threads
    assert thread.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, thread.native_id) == max(10, before)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
