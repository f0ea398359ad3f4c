"""How long it takes until API servers are connected, as an engine core tells it; the last one counts."""

import time

import pytest

from tests.support.engine_bench import Bench
from tokenmill_engine.messages import ClientGone, Hello
from tokenmill_engine.metrics import EngineMetrics


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What is recorded."""
    served: list[float] = []
    monkeypatch.setattr(EngineMetrics, "set_serve", lambda metrics, elapsed_s: served.append(elapsed_s))
    return served


def test_every_api_server_counts_once(served: list[float]) -> None:
    bench = Bench(began=time.monotonic() - 3.0)
    for client in (0, 1):
        bench.core.handle(Hello(client))
    assert len(served) == 2
    assert 3.0 <= served[0] <= served[1]


@pytest.mark.parametrize(
    "messages",
    [(Hello(0),), (Hello(0, 1),), (ClientGone(0, 0), Hello(0, 1))],
    ids=["again", "successor", "successor of a dead one"],
)
def test_one_that_comes_long_after_the_start_does_not(
    served: list[float], messages: tuple[Hello | ClientGone, ...]
) -> None:
    bench = Bench(began=time.monotonic())
    bench.core.handle(Hello(0))
    for message in messages:
        bench.core.handle(message)
    assert len(served) == 1


def test_nobody_is_told_where_nobody_asks(served: list[float]) -> None:
    Bench().core.handle(Hello(0))
    assert served == []
