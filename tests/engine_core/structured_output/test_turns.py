"""Who is compiled when."""

import os
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.support.grammars import spec
from tests.support.server import PATIENCE_S, wait_for
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


class Clock:
    """Stands still, unless a test says otherwise."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    return clock


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Callable[..., Work]]:
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


def test_they_wait_while_long_turns_are_of_use(make: Callable[..., Work], clock: Clock) -> None:
    """Else not for long."""
    work = make()
    for number in range(3):
        work.turns.join(named(SLOW, number))
    first, *_ = (name for name, is_long in [work.next() for _ in range(4)] if is_long)
    wait_for(lambda: work.has_long(2), PATIENCE_S, "the others to wait")
    clock.now += 1.5
    work.release.release()
    second, is_long = work.next()
    assert is_long
    clock.now += 1.5
    work.turns.join(named(ORDINARY, 1))
    assert work.next() == ("ordinary 1", False)
    assert work.sent_away.empty(), "it is three seconds late, but half of them were of use"
    clock.now += 1
    work.turns.join(named(ORDINARY, 2))
    assert work.next() == ("ordinary 2", False)
    assert {first, second, work.sent_away.get(timeout=PATIENCE_S)} == {f"slow {number}" for number in range(3)}


def test_long_turns_in_vain_are_of_no_use(make: Callable[..., Work], clock: Clock) -> None:
    work = make()
    work.turns.join(named(HOSTILE))
    assert [work.next() for _ in range(2)] == [("hostile 0", False), ("hostile 0", True)]
    work.turns.join(named(SLOW))
    assert work.next() == ("slow 0", False)
    wait_for(lambda: work.has_long(1), PATIENCE_S, "it to wait")
    clock.now += 3
    work.release.release()
    assert work.sent_away.get(timeout=PATIENCE_S) == "slow 0"


def test_who_leaves_has_no_turn(make: Callable[..., Work]) -> None:
    work = make()
    work.holds_short = True
    for number in range(5):
        work.turns.join(named(SLOW, number))
    assert sorted(work.next() for _ in range(4)) == [(f"slow {number}", False) for number in range(4)]
    assert not work.turns.leave(named(SLOW, 0)), "its turn is under way"
    assert work.turns.leave(named(SLOW, 4))
    work.release_short.release(4)
    assert work.next()[1]
    wait_for(lambda: work.has_long(3), PATIENCE_S, "the others to wait for a long turn")
    waiting = [*work.turns._long]
    assert all(work.turns.leave(each) for each in waiting)
    work.release.release()
    work.turns.join(named(ORDINARY))
    work.release_short.release()
    assert work.next() == ("ordinary 0", False)


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
