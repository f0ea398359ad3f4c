import pytest

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import EngineLoad
from tokenmill_server.load_balancer import LoadBalancer


def test_idle_engines_take_turns() -> None:
    balancer = LoadBalancer(3)
    assert [balancer.choose() for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_engine_is_chosen() -> None:
    balancer = LoadBalancer(3)
    for engine, (running, waiting) in enumerate([(4, 1), (2, 0), (3, 9)]):
        balancer.reported(engine, EngineLoad(running, waiting, 0.0))
    assert [balancer.choose() for _ in range(3)] == [1, 1, 1]


def test_own_requests_count_before_the_engine_reports_them() -> None:
    balancer = LoadBalancer(2)
    balancer.reported(0, EngineLoad(3, 0, 0.0))
    chosen = []
    for _ in range(7):
        engine = balancer.choose()
        balancer.sent(engine, 1)
        chosen.append(engine)
    assert chosen.count(1) == 5


def test_a_report_that_does_not_know_of_a_request_yet_does_not_hide_it() -> None:
    balancer = LoadBalancer(2)
    balancer.sent(0, 4)
    balancer.reported(0, EngineLoad(0, 0, 0.0))
    assert balancer.choose() == 1


def test_ended_requests_do_not_count() -> None:
    balancer = LoadBalancer(2)
    balancer.sent(0, 2)
    balancer.sent(1, 1)
    balancer.ended(0)
    balancer.ended(0)
    balancer.reported(0, EngineLoad(0, 0, 0.0))
    assert balancer.choose() == 0
    assert (balancer.in_flight(0), balancer.in_flight(1)) == (0, 1)


def test_a_pinned_rank_is_used_whatever_its_load() -> None:
    balancer = LoadBalancer(2)
    balancer.reported(1, EngineLoad(100, 100, 1.0))
    assert balancer.choose(pinned=1) == 1
    for rank in (-1, 2):
        with pytest.raises(InvalidRequestError, match="ranks are 0 to 1"):
            balancer.choose(pinned=rank)
