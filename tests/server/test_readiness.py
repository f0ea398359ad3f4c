import pytest

from tokenmill_engine.errors import EngineDeadError, EngineStartingError, TokenmillError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EngineStalled
from tokenmill_server.errors import ShuttingDownError
from tokenmill_server.readiness import Phase, Readiness


def test_a_life() -> None:
    readiness = Readiness()
    errors: list[type[TokenmillError] | None] = []
    for phase in (None, Phase.READY, Phase.DRAINING, Phase.DEAD):
        if phase is not None:
            readiness.move(phase)
        try:
            readiness.check()
            errors.append(None)
        except TokenmillError as error:
            errors.append(type(error))
    assert errors == [EngineStartingError, None, ShuttingDownError, EngineDeadError]


def test_the_reason_is_what_clients_are_told() -> None:
    readiness = Readiness()
    readiness.move(Phase.DEAD, "engine core 1 was killed")
    with pytest.raises(EngineDeadError, match="engine core 1 was killed"):
        readiness.check()


def test_a_head_names_the_ranks_that_it_waits_for() -> None:
    readiness = Readiness(4)
    assert readiness.reason == "the model is still loading"
    readiness.ranks_missing([1, 2, 3])
    with pytest.raises(EngineStartingError, match="no launcher has ranks 1 to 3 yet"):
        readiness.check()
    readiness.ranks_missing([3])
    assert readiness.reason == "no launcher has rank 3 yet"
    readiness.ranks_missing([])
    assert readiness.reason == "the model is still loading"
    readiness.move(Phase.DRAINING)
    readiness.ranks_missing([3])
    assert readiness.reason == "the server is shutting down"


@pytest.mark.parametrize("phase", list(Phase))
def test_nothing_follows_death(phase: Phase) -> None:
    readiness = Readiness()
    readiness.move(Phase.DEAD)
    with pytest.raises(ValueError, match="no way from DEAD"):
        readiness.move(phase)


def test_the_phase_follows_the_engine_cores() -> None:
    readiness = Readiness(2)
    assert readiness.phase is Phase.STARTING
    readiness.engine_joined(0, 0)
    assert readiness.phase is Phase.READY
    readiness.engine_joined(1, 0)
    readiness.engine_lost(EngineLost(0, 0, "engine core 0 is gone"))
    assert readiness.phase is Phase.READY
    readiness.engine_lost(EngineLost(1, 0, "engine core 1 is gone", restarts=True))
    with pytest.raises(EngineStartingError, match="engine core 1 is gone; it is being restarted"):
        readiness.check()
    readiness.engine_joined(1, 1)
    readiness.check()
    readiness.engine_lost(EngineLost(1, 1, "engine core 1 is gone again"))
    with pytest.raises(EngineDeadError, match="engine core 1 is gone again"):
        readiness.check()
    readiness.engine_lost(EngineLost(1, 1, "once more"))
    assert [(fault.engine, fault.status) for fault in readiness.engine_faults] == [(0, "dead"), (1, "dead")]


def test_a_drain_goes_on_without_engine_cores() -> None:
    readiness = Readiness(1)
    readiness.engine_joined(0, 0)
    readiness.move(Phase.DRAINING)
    readiness.engine_lost(EngineLost(0, 0, "engine core 0 is gone", restarts=True))
    assert readiness.phase is Phase.DRAINING
    readiness.engine_joined(0, 1)
    assert readiness.phase is Phase.DRAINING
    readiness.engine_unreachable(0, "the connection broke")
    assert readiness.phase is Phase.DRAINING


def test_stalls_end_with_a_recovery_or_with_the_engine_core() -> None:
    readiness = Readiness(2)
    for engine in range(2):
        readiness.engine_joined(engine, 0)
        assert not readiness.is_stalled
        readiness.engine_stalls(EngineStalled(engine, 0, 0.0))
    assert readiness.is_stalled
    readiness.check()
    readiness.engine_stalls(EngineRecovered(1, 0))
    assert not readiness.is_stalled
    assert [fault.status for fault in readiness.engine_faults] == ["stalled"]
    readiness.engine_lost(EngineLost(0, 0, "engine core 0 is gone", restarts=True))
    readiness.engine_joined(0, 1)
    readiness.engine_stalls(EngineStalled(0, 0, 0.0))
    assert readiness.engine_faults == []
    readiness.engine_lost(EngineLost(0, 1, "engine core 0 is gone", restarts=True))
    readiness.engine_stalls(EngineStalled(0, 1, 0.0))
    assert [fault.status for fault in readiness.engine_faults] == ["restarting"]


def test_a_recovery_of_another_incarnation_changes_nothing() -> None:
    readiness = Readiness(1)
    readiness.engine_joined(0, 1)
    readiness.engine_stalls(EngineStalled(0, 1, 0.0))
    readiness.engine_stalls(EngineRecovered(0, 0))
    assert readiness.is_stalled
    readiness.engine_stalls(EngineRecovered(0, 1))
    assert not readiness.is_stalled


def test_only_those_that_are_being_restarted_are_said_to_be() -> None:
    readiness = Readiness(2)
    readiness.engine_joined(0, 0)
    readiness.engine_lost(EngineLost(1, 0, "engine core 1 was killed", restarts=True))
    readiness.engine_lost(EngineLost(0, 0, "engine core 0 is gone for good"))
    assert readiness.reason == "engine core 1 was killed; it is being restarted"
    readiness.engine_lost(EngineLost(1, 0, "engine core 1 was killed"))
    assert readiness.phase is Phase.DEAD


def test_one_that_only_another_launcher_brings_back_is_missing_and_not_restarting() -> None:
    """It keeps hope alive all the same: the head does not end for it."""
    readiness = Readiness(3)
    readiness.engine_joined(0, 0)
    readiness.engine_lost(EngineLost(1, 0, "engine core 1 is gone with its launcher", may_return=True))
    readiness.engine_lost(EngineLost(2, 0, "engine core 2 was killed", restarts=True))
    assert [(fault.engine, fault.status) for fault in readiness.engine_faults] == [(1, "missing"), (2, "restarting")]
    readiness.engine_lost(EngineLost(0, 0, "engine core 0 was killed"))
    assert readiness.reason == "engine core 2 was killed; it is being restarted"
    readiness.engine_lost(EngineLost(2, 1, "engine core 2 was killed"))
    with pytest.raises(EngineStartingError, match=r"with its launcher; a launcher that brings it back may join$"):
        readiness.check()
    readiness.engine_joined(1, 1)
    readiness.check()
    readiness.engine_lost(EngineLost(1, 1, "engine core 1 was killed"))
    assert readiness.phase is Phase.DEAD


def test_one_that_takes_nothing_new_is_out_of_rotation() -> None:
    """Whether it gets done what it has is no concern of new requests."""
    readiness = Readiness(2)
    for engine in range(2):
        readiness.engine_joined(engine, 0)
    readiness.engine_stalls(EngineStalled(1, 0, 0.0))
    readiness.engine_drains(EngineDraining(1, 0, "engine core 1 drains"))
    assert [(fault.engine, fault.status, fault.reason) for fault in readiness.engine_faults] == [
        (1, "draining", "engine core 1 drains")
    ]
    readiness.engine_stalls(EngineStalled(1, 0, 0.0))
    assert (readiness.phase, readiness.is_stalled, len(readiness.engine_faults)) == (Phase.READY, False, 1)
    readiness.engine_drains(EngineDraining(0, 0, "engine core 0 drains"))
    with pytest.raises(EngineStartingError, match="engine core 0 drains; another launcher may bring it back"):
        readiness.check()
    readiness.engine_lost(EngineLost(1, 0, "engine core 1 is gone", may_return=True, planned=True))
    assert [fault.status for fault in readiness.engine_faults] == ["draining", "missing"]
    readiness.engine_joined(1, 1)
    readiness.check()


def test_an_unreachable_engine_core_is_named_and_may_come_back() -> None:
    readiness = Readiness(2)
    readiness.engine_joined(0, 0)
    readiness.engine_unreachable(1, "engine core 1 cannot be reached")
    assert readiness.phase is Phase.READY
    assert [(fault.engine, fault.status) for fault in readiness.engine_faults] == [(1, "unreachable")]
    readiness.engine_lost(EngineLost(0, 0, "engine core 0 is gone for good"))
    with pytest.raises(EngineStartingError, match="engine core 1 cannot be reached"):
        readiness.check()
    readiness.engine_joined(1, 0)
    readiness.check()
    readiness.engine_unreachable(1, "its connection broke")
    assert (readiness.phase, readiness.reason) == (Phase.STARTING, "its connection broke")
    readiness.engine_lost(EngineLost(1, 0, "engine core 1 was killed"))
    assert readiness.phase is Phase.DEAD
    assert [fault.status for fault in readiness.engine_faults] == ["dead", "dead"]
