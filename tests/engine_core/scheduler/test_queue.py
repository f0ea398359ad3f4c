"""Waiting queues: order, put back, removal from anywhere."""

import pytest

from tests.support.scheduling import make_request
from tokenmill_engine.config.engine import SchedulingPolicy
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.queue import make_queue

POLICIES = pytest.mark.parametrize("policy", ["fcfs", "priority"])


def order(policy: SchedulingPolicy, requests: list[Request], put_back: list[Request]) -> list[int]:
    queue = make_queue(policy)
    for request in requests:
        queue.add(request)
    for request in put_back:
        queue.put_back(request)
    assert len(queue) == len(requests) + len(put_back)
    return [request.request_id for request in queue]


def test_first_come_first_served_ignores_priority_and_puts_the_preempted_in_front() -> None:
    requests = [make_request(1, 3.0), make_request(2, 1.0, priority=-1), make_request(3, 2.0)]
    back = [make_request(8, 0.5), make_request(7, 0.1)]
    assert order("fcfs", requests, back) == [7, 8, 1, 2, 3]


def test_priority_then_arrival_for_the_preempted_too() -> None:
    requests = [make_request(1, 3.0), make_request(2, 1.0, priority=1), make_request(3, 2.0)]
    back = [make_request(4, 0.5, priority=2), make_request(5, 2.5)]
    assert order("priority", requests, back) == [3, 5, 1, 2, 4]


@POLICIES
def test_requests_leave_from_anywhere(policy: SchedulingPolicy) -> None:
    queue = make_queue(policy)
    requests = [make_request(number, arrival_time=float(number % 3)) for number in range(9)]
    for request in requests:
        queue.add(request)
    for request in requests[::2]:
        queue.remove(request)
    assert {request.request_id for request in queue} == {1, 3, 5, 7}
    with pytest.raises(KeyError):
        queue.remove(requests[0])
