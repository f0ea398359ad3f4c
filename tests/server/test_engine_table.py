"""What becomes of the engine cores' states, and who hears of an API server's death."""

from pathlib import Path

import msgspec
import zmq

from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EnginesReady, EngineStalled
from tokenmill_engine.ipc.sockets import bind_router, local_endpoints
from tokenmill_engine.messages import ClientGone, EngineReady
from tokenmill_server.engine_table import EngineTable


def ready(engine: int, incarnation: int = 0, run_dir: str = "/nowhere") -> EngineReady:
    endpoints = local_endpoints(run_dir, engine, incarnation)
    return EngineReady(engine, incarnation, endpoints, 128, 8, 16, 128, "none")


def lost(engine: int, restarts: bool) -> EngineLost:
    return EngineLost(engine, 0, f"engine core {engine} is gone", restarts)


def test_settled_means_that_nobody_is_still_to_come() -> None:
    table = EngineTable(3)
    for update, settled in (
        (ready(2), False),
        (lost(0, restarts=True), False),
        (ready(1), False),
        (lost(0, restarts=False), True),
        (lost(1, restarts=True), False),
        (ready(1, 1), True),
    ):
        table.apply(update)
        assert table.is_settled == settled
    assert [state.engine for state in table.ready] == [1, 2]
    assert table.ready[0].incarnation == 1
    assert table.lost == [lost(0, restarts=False)]


def test_who_may_return_with_another_launcher_is_neither_hopeless_nor_settled() -> None:
    table = EngineTable(2)
    table.apply(ready(0))
    table.apply(EngineLost(1, 0, "engine core 1 is gone with its launcher", may_return=True))
    assert not table.is_settled
    table.apply(lost(0, restarts=False))
    assert not table.is_hopeless
    table.apply(lost(1, restarts=False))
    assert table.is_hopeless


def test_hopeless_is_who_has_lost_all_for_good() -> None:
    table = EngineTable(2)
    table.apply(ready(0))
    table.apply(lost(0, restarts=False))
    assert not table.is_hopeless  # the other one is still starting
    table.apply(lost(1, restarts=True))
    assert not table.is_hopeless
    assert not table.is_settled
    table.apply(lost(1, restarts=False))
    assert table.is_hopeless
    assert not table.is_settled


def test_the_introduction_tells_of_stalls_that_last() -> None:
    table = EngineTable(3)
    stalls = [EngineStalled(engine, 0, 1.0) for engine in range(3)]
    for engine in range(3):
        table.apply(ready(engine))
        table.apply(stalls[engine])
    table.apply(EngineRecovered(0, 0))
    table.apply(lost(1, restarts=True))
    assert table.introduction == EnginesReady([ready(0), ready(2)], [lost(1, restarts=True)], [stalls[2]])
    table.apply(ready(1, 1))
    assert table.introduction.stalled == [stalls[2]]


def test_the_introduction_tells_who_takes_nothing_new_and_death_ends_that() -> None:
    """Until then it is there, for what it has."""
    table = EngineTable(2)
    draining = EngineDraining(1, 0, "engine core 1 drains")
    for update in (ready(0), ready(1), draining, EngineStalled(1, 0, 1.0)):
        table.apply(update)
    assert table.introduction == EnginesReady([ready(0)], draining=[draining])
    assert table.ready == [ready(0), ready(1)]
    gone = EngineLost(1, 0, "engine core 1 is gone with its launcher", may_return=True, planned=True)
    table.apply(gone)
    assert table.introduction == EnginesReady([ready(0)], [gone])
    table.apply(ready(1, 1))
    assert table.introduction == EnginesReady([ready(0), ready(1, 1)])


def test_engine_cores_that_are_there_hear_of_a_dead_api_server(tmp_path: Path) -> None:
    """Also the next incarnation of one that had heard before."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    table = EngineTable(2)
    table.apply(lost(1, restarts=True))
    for incarnation in range(2):
        state = ready(0, incarnation, str(tmp_path))
        with bind_router(context, state.endpoints.input) as socket:
            table.apply(state)
            table.client_gone(3, incarnation)
            assert socket.poll(20_000)
            frame = socket.recv_multipart()[-1]
            assert msgspec.msgpack.decode(frame, type=ClientGone) == ClientGone(3, incarnation)
    table.close()
    table.close()
    context.term()
