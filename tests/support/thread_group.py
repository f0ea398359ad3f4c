"""Workers that are threads of one process, and what they say to each other: real sums, no sockets."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from tokenmill_engine.distributed.group import norm_sum

Result = TypeVar("Result")

_DEADLINE_S = 60.0
"""For the slowest member to come: then it hangs or another one called something else."""


class _Meeting:
    """Where members leave what they have until all have seen it."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_DEADLINE_S)
        self.values: list[object] = [None] * size


class ThreadGroup:
    """One member. Sums are made in the order of ranks, by every member alike."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.barrier.parties
        self.calls: list[str] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        values = self._exchange("all_reduce", x)
        assert all(value.shape == x.shape and value.dtype == x.dtype for value in values)
        total = values[0].clone()
        for value in values[1:]:
            total += value
        return self._when_all_are_done(total)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_sum(self.all_reduce(x), residual, weight, eps, out)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        values = self._exchange("all_gather", x)
        assert all(value.shape == x.shape and value.dtype == x.dtype for value in values)
        return self._when_all_are_done(torch.cat(values, dim=-1))

    def agree_min(self, value: int) -> int:
        values = self._exchange("agree_min", torch.tensor(value))
        return self._when_all_are_done(min(int(other) for other in values))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        """Let the others' calls fail at once."""
        self._meeting.barrier.abort()

    def _exchange(self, call: str, x: torch.Tensor) -> list[torch.Tensor]:
        """What all members brought to the same call."""
        self.calls.append(call)
        self._meeting.values[self.rank] = (call, x)
        self._meeting.barrier.wait()
        calls, values = zip(*self._meeting.values, strict=True)
        assert set(calls) == {call}
        return list(values)

    def _when_all_are_done(self, result: Result) -> Result:
        self._meeting.barrier.wait()
        return result


def thread_groups(size: int) -> list[ThreadGroup]:
    """The members of one group."""
    meeting = _Meeting(size)
    return [ThreadGroup(meeting, rank) for rank in range(size)]


def on_every_rank(groups: Sequence[ThreadGroup], work: Callable[[ThreadGroup], Result]) -> list[Result]:
    """What `work` gives on each member, all at once in threads of their own. The first error is raised."""
    failures: list[BaseException] = []

    def run(group: ThreadGroup) -> Result:
        try:
            return work(group)
        except BaseException as error:
            failures.append(error)
            group.abort()
            raise

    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(run, group) for group in groups]
    if failures:
        raise failures[0]
    return [future.result() for future in futures]
