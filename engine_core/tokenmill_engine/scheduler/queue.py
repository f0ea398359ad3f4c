"""Requests that wait for a slot, in the order in which they are to be admitted."""

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from tokenmill_engine.config.engine import SchedulingPolicy
from tokenmill_engine.request import Request


class WaitingQueue(Protocol):
    """Iteration yields the next request to admit first and changes nothing."""

    num_tokens: int
    """That the waiting requests have, prompts and, of preempted ones, outputs."""

    def add(self, request: Request) -> None:
        """A request arrives."""

    def put_back(self, request: Request) -> None:
        """A request was preempted."""

    def remove(self, request: Request) -> None:
        """A request is admitted or aborted. Raises KeyError if it does not wait."""

    def __iter__(self) -> Iterator[Request]: ...

    def __len__(self) -> int: ...


class FcfsQueue:
    """First come, first served; a preempted request goes to the front. Every operation is O(1)."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.num_tokens += request.num_known_tokens

    def put_back(self, request: Request) -> None:
        self.add(request)
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= request.num_known_tokens

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """Lowest `priority` value first, then earliest arrival; preempted requests take their place by the same rule."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._keys: list[tuple[int, float, int]] = []
        self._requests: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        bisect.insort(self._keys, self._key(request))
        self._requests[request.request_id] = request
        self.num_tokens += request.num_known_tokens

    def put_back(self, request: Request) -> None:
        self.add(request)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        del self._keys[bisect.bisect_left(self._keys, self._key(request))]
        self.num_tokens -= request.num_known_tokens

    def __iter__(self) -> Iterator[Request]:
        return (self._requests[request_id] for _, _, request_id in self._keys)

    def __len__(self) -> int:
        return len(self._requests)

    @staticmethod
    def _key(request: Request) -> tuple[int, float, int]:
        return (request.priority, request.arrival_time, request.request_id)


def make_queue(policy: SchedulingPolicy) -> WaitingQueue:
    """The queue for a scheduling policy."""
    return PriorityQueue() if policy == "priority" else FcfsQueue()
