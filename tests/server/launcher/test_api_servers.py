"""API servers that take the place of others, on a machine that does not always let one start: without processes."""

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.api_server import engine_config
from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.ipc.child import ChildProcess
from tokenmill_engine.ipc.control import FromApiServer
from tokenmill_server import api_servers
from tokenmill_server.api_servers import ApiServers
from tokenmill_server.config import Configuration, ServerConfig
from tokenmill_server.watcher import Watcher


class Machine:
    """Starts processes, or does not; and its clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.num_started = 0
        self.refuses: OSError | None = None

    def monotonic(self) -> float:
        return self.now

    def spawn(self, *_: Any, **__: Any) -> ChildProcess[FromApiServer]:
        if self.refuses is not None:
            raise self.refuses
        self.num_started += 1
        nobody = SimpleNamespace(pid=1, send=lambda message: None)
        return ChildProcess(cast(Any, nobody), cast(Any, nobody))

    def wait(self, servers: ApiServers, duration_s: int) -> list[int]:
        """The slots in which others are started meanwhile."""
        started = []
        for _ in range(duration_s):
            self.now += 1.0
            started += servers.tick()
        return started


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(api_servers, "time", machine)
    monkeypatch.setattr(api_servers, "spawn_child", machine.spawn)
    return machine


@pytest.fixture
def servers(machine: Machine) -> ApiServers:
    """Two of them, not started."""
    nobody = cast(Watcher, SimpleNamespace(add=lambda key, child: None))
    return ApiServers(Configuration(engine_config(), ServerConfig(api_server_count=2)), 0, "/nowhere", {}, nobody)


def test_one_that_ended_is_replaced_at_once(machine: Machine, servers: ApiServers) -> None:
    servers.start()
    assert servers.ended(1, -9).endswith("for want of memory, lower --kv-cache-memory-bytes or --api-server-count")
    servers.replace(1)
    assert servers.running == {0}
    assert servers.next_tick <= machine.now
    assert servers.tick() == [1]
    assert (servers.running, servers.incarnation(1)) == ({0, 1}, 1)
    assert machine.wait(servers, 100) == []


def test_a_start_that_the_machine_does_not_allow_is_tried_again(machine: Machine, servers: ApiServers) -> None:
    servers.start()
    servers.ended(1, -9)
    servers.count_death("was killed")
    servers.replace(1)
    machine.refuses = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    assert servers.tick() == []
    assert machine.wait(servers, 10) == []
    servers.broadcast(cast(Any, None))
    machine.refuses = None
    assert machine.wait(servers, 10) == [1]
    assert (machine.num_started, servers.incarnation(1)) == (3, 1)


def test_too_many_starts_that_fail_are_the_end(machine: Machine, servers: ApiServers) -> None:
    servers.start()
    servers.ended(0, -9)
    servers.replace(0)
    machine.refuses = OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(EngineDeadError, match=r"the last one could not be started: .*Cannot allocate memory"):
        machine.wait(servers, 100)
    assert machine.now >= 1020


def test_once_the_end_has_begun_nothing_is_replaced(machine: Machine, servers: ApiServers) -> None:
    servers.start()
    servers.ended(0, -9)
    servers.replace(0)
    servers.end_replacements()
    assert machine.wait(servers, 10) == []


def test_a_first_start_that_the_machine_does_not_allow_is_an_error(machine: Machine, servers: ApiServers) -> None:
    machine.refuses = OSError(errno.ENOMEM, "Cannot allocate memory")
    with pytest.raises(StartupError, match=r"API server 0 could not be started: .*Cannot allocate memory"):
        servers.start()
