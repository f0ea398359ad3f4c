"""What an engine core is started with, and when a dead one is started again: without processes and without waiting."""

import errno
import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.api_server import engine_config
from tokenmill_engine.errors import StartupError
from tokenmill_engine.ipc.channel import ControlChannel
from tokenmill_engine.ipc.child import ChildProcess
from tokenmill_engine.ipc.control import (
    EngineControl,
    EngineFailed,
    EngineLost,
    EngineStalled,
    EngineStart,
    FromEngine,
    Pulse,
    StartFailed,
)
from tokenmill_engine.ipc.sockets import local_endpoints
from tokenmill_engine.messages import EngineReady
from tokenmill_server import liveness, supervisor
from tokenmill_server.config import FaultConfig
from tokenmill_server.engine_table import EngineUpdate
from tokenmill_server.supervisor import EngineSupervisor, _engine_environment
from tokenmill_server.watcher import Exited, Said, Watcher


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("4,GPU-5,6", ["4", "GPU-5", "6"]),
        ("", ["", "", ""]),
        ("4,5", ["4", "5", ""]),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_sees_a_gpu_of_its_own(visible: str | None, expected: list[str], device: str) -> None:
    """Too few are an error of the configuration, which is checked meanwhile."""
    environment = {"A": "b"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    seen = [_engine_environment(environment, device, 3, rank, 1) for rank in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == expected
    assert all(each["A"] == "b" for each in seen)


def test_a_single_engine_core_sees_what_we_see() -> None:
    assert _engine_environment({"CUDA_VISIBLE_DEVICES": "3,4"}, "cuda", 1, 0, 2) == {"CUDA_VISIBLE_DEVICES": "3,4"}
    assert _engine_environment({}, "cuda", 1, 0, 1) == {}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, ["0,1", "2,3"]), ("4,GPU-5,6,7", ["4,GPU-5", "6,7"]), ("4,5,6", ["4,5", "6"]), ("", ["", ""])],
)
def test_workers_of_an_engine_core_have_gpus_in_a_row(visible: str | None, expected: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    seen = [_engine_environment(environment, "auto", 2, index, 2)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert seen == expected


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "3,4"}])
def test_on_the_cpu_nobody_needs_a_gpu_of_its_own(environment: dict[str, str]) -> None:
    assert [_engine_environment(environment, "cpu", 2, rank, 2) for rank in range(2)] == [environment] * 2


class Clock:
    """The monotonic clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.starts: list[float] = []
        self.refuses: OSError | None = None
        """Why no process can be started."""
        self.kills: list[float] = []
        self.children: list[ControlChannel[EngineControl]] = []
        """The ends of their channels that processes would read."""

    def monotonic(self) -> float:
        return self.now


class Nobody:
    """Watches no child."""

    def add(self, key: Any, child: Any) -> None:
        """There is no process to watch."""


class Machine:
    """One engine core and what happens to it."""

    def __init__(self, clock: Clock, num_restarts: int, stall_timeout_s: float = 300.0) -> None:
        self.clock = clock
        self.engines = EngineSupervisor("/nowhere", cast(Watcher, Nobody()), clock.now)
        self.engines.spawn(1, "cpu", {})
        self.engines.configure(engine_config(), FaultConfig(num_restarts, stall_timeout_s))

    def become_ready(self, incarnation: int) -> None:
        state = EngineReady(0, incarnation, local_endpoints("/nowhere", 0, incarnation), 128, 8, 16, 128, "none")
        assert self.engines.handle(Said(("engine", 0), state)) == state

    def say(self, message: StartFailed | EngineFailed) -> None:
        assert self.engines.handle(Said(("engine", 0), message)) is None

    def exit(self) -> EngineUpdate | None:
        return self.engines.handle(Exited(("engine", 0), -9, 1))

    def die(self) -> EngineLost:
        update = self.exit()
        assert isinstance(update, EngineLost)
        return update

    def wait(self, duration_s: int) -> list[EngineUpdate]:
        """What a launcher hears meanwhile."""
        updates = []
        for _ in range(duration_s):
            self.clock.now += 1.0
            updates += self.engines.tick()
        return updates


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Processes are neither started nor killed, only the times at which they would be are noted in `clock`."""
    clock = Clock()
    sockets: list[socket.socket] = []

    def spawn(*_: Any, **__: Any) -> ChildProcess[FromEngine]:
        if clock.refuses is not None:
            raise clock.refuses
        clock.starts.append(clock.now)
        ours, theirs = socket.socketpair()
        sockets.append(ours)
        clock.children.append(ControlChannel(theirs, EngineControl))
        return ChildProcess(cast(Any, SimpleNamespace(pid=1)), ControlChannel(ours, FromEngine))

    monkeypatch.setattr(supervisor, "spawn_child", spawn)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(liveness, "time", clock)
    monkeypatch.setattr(os, "killpg", lambda pid, number: clock.kills.append(clock.now))
    yield clock
    for one in (*sockets, *clock.children):
        one.close()


def test_restarts_come_later_and_later_until_it_stays_away(clock: Clock) -> None:
    machine = Machine(clock, 4)
    for incarnation, delay_s in enumerate((0, 1, 2, 4)):
        machine.become_ready(incarnation)
        lost = machine.die()
        assert (lost.engine, lost.incarnation, lost.restarts) == (0, incarnation, True)
        assert machine.engines.next_tick <= clock.now + delay_s
        if delay_s:
            clock.now += delay_s - 0.1
            machine.engines.tick()
            assert len(clock.starts) == incarnation + 1
            clock.now += 0.1
        machine.engines.tick()
        assert len(clock.starts) == incarnation + 2
    machine.become_ready(4)
    assert not machine.die().restarts
    clock.now += 1000
    machine.engines.tick()
    assert len(clock.starts) == 5


def test_long_service_makes_up_for_deaths(clock: Clock) -> None:
    machine = Machine(clock, 1)
    for incarnation in range(5):
        machine.become_ready(incarnation)
        clock.now += 600
        assert machine.die().restarts
        machine.engines.tick()
    machine.become_ready(5)
    clock.now += 599
    assert not machine.die().restarts


def test_only_a_first_start_that_fails_is_an_error(clock: Clock) -> None:
    machine = Machine(clock, 2)
    with pytest.raises(StartupError, match=r"engine core 0 was killed .* while it was starting"):
        machine.die()
    machine = Machine(clock, 2)
    machine.become_ready(0)
    machine.die()
    machine.engines.tick()
    machine.say(StartFailed("the model is not there any more"))
    lost = machine.die()
    assert (lost.message, lost.restarts) == ("the model is not there any more", True)
    clock.now += 1
    machine.engines.tick()
    assert machine.die().message.startswith("engine core 0 was killed (SIGKILL) while it was starting; ")


def test_one_that_cannot_go_on_says_why_itself(clock: Clock) -> None:
    machine = Machine(clock, 2)
    machine.become_ready(0)
    machine.say(EngineFailed("engine core 0 is lost: worker 0.1 was killed (SIGKILL)"))
    assert machine.die() == EngineLost(0, 0, "engine core 0 is lost: worker 0.1 was killed (SIGKILL)", restarts=True)
    machine.engines.tick()
    machine.become_ready(1)
    assert machine.die().message.startswith("engine core 0 was killed (SIGKILL)")


def test_nothing_is_restarted_once_the_end_has_begun(clock: Clock) -> None:
    machine = Machine(clock, 3)
    machine.become_ready(0)
    assert machine.die().restarts
    machine.engines.end_restarts()
    clock.now += 100
    machine.engines.tick()
    assert len(clock.starts) == 1


def test_one_that_does_not_end_when_it_is_killed_is_lost_all_the_same(clock: Clock) -> None:
    """It hangs in the kernel. Whatever it said last is too late; when it is gone at last, it is started again."""
    machine = Machine(clock, 3)
    machine.become_ready(0)
    reason = "engine core 0 did not react for 30 s and was killed"
    assert machine.wait(40) == [EngineLost(0, 0, reason, restarts=True)]
    ready = EngineReady(0, 0, local_endpoints("/nowhere", 0, 0), 128, 8, 16, 128, "none")
    for late in (Pulse(1, True), ready, StartFailed("too late")):
        assert machine.engines.handle(Said(("engine", 0), late)) is None
    assert machine.wait(1000) == []
    assert (len(clock.kills), len(clock.starts)) == (1, 1)
    assert machine.exit() is None
    assert machine.wait(1) == []
    assert len(clock.starts) == 2
    machine.become_ready(1)
    assert machine.die().message.startswith("engine core 0 was killed (SIGKILL)")


def test_one_that_is_stalled_is_lost_when_it_is_killed(clock: Clock) -> None:
    machine = Machine(clock, 0, stall_timeout_s=8)
    machine.become_ready(0)
    stalled, lost = machine.wait(40)
    assert isinstance(stalled, EngineStalled)
    assert lost == EngineLost(0, 0, "engine core 0 had work but finished no step for 16 s and was killed")
    assert machine.exit() is None
    assert machine.wait(100) == []
    assert len(clock.starts) == 1


@pytest.mark.parametrize(("timeout_s", "gives_up"), [(300, True), (0, False)])
def test_engine_cores_are_told_whether_stopped_workers_are_given_up(
    timeout_s: float, gives_up: bool, clock: Clock
) -> None:
    """Also those that are started again."""
    machine = Machine(clock, 1, stall_timeout_s=timeout_s)
    machine.become_ready(0)
    machine.die()
    machine.wait(2)
    starts = [child.receive() for child in clock.children]
    assert [start.gives_up for start in starts if isinstance(start, EngineStart)] == [gives_up] * 2


def test_a_start_may_take_as_long_as_it_needs(clock: Clock) -> None:
    """The first one and every other: nothing that is done before an engine core is ready is a step."""
    machine = Machine(clock, 1, stall_timeout_s=5)
    assert machine.wait(1000) == []
    machine.become_ready(0)
    machine.die()
    assert machine.wait(1000) == []
    machine.become_ready(1)
    assert [type(update) for update in machine.wait(8)] == [EngineStalled]


def test_nothing_is_restarted_that_ends_after_the_end_has_begun(clock: Clock) -> None:
    machine = Machine(clock, 3)
    machine.become_ready(0)
    assert len(machine.wait(40)) == 1
    machine.engines.end_restarts()
    assert machine.exit() is None
    assert machine.wait(100) == []
    assert len(clock.starts) == 1


def test_a_restart_that_the_machine_does_not_allow_is_one_more_death(clock: Clock) -> None:
    """Sooner or later it has memory for a process again, or the engine core stays away."""
    machine = Machine(clock, 4)
    machine.become_ready(0)
    machine.die()
    clock.refuses = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    reason = f"engine core 0 could not be started: {clock.refuses}"
    assert machine.wait(3) == [EngineLost(0, number, reason, restarts=True) for number in (1, 2)]
    clock.refuses = None
    assert machine.wait(2) == []
    machine.become_ready(3)
    assert machine.die().restarts
    clock.refuses = OSError(errno.ENOMEM, "Cannot allocate memory")
    (lost,) = machine.wait(20)
    assert isinstance(lost, EngineLost)
    assert (lost.incarnation, lost.restarts) == (4, False)
    assert "Cannot allocate memory" in lost.message


def test_a_first_start_that_the_machine_does_not_allow_is_an_error(clock: Clock) -> None:
    clock.refuses = OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(StartupError, match=r"engine core 0 could not be started: .*Cannot allocate memory"):
        Machine(clock, 3)
