import pytest

from tokenmill_engine.errors import EngineDeadError, EngineStartingError, TokenmillError
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


@pytest.mark.parametrize("phase", list(Phase))
def test_nothing_follows_death(phase: Phase) -> None:
    readiness = Readiness()
    readiness.move(Phase.DEAD)
    with pytest.raises(ValueError, match="no way from DEAD"):
        readiness.move(phase)
