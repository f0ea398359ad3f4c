"""Workers as threads, as in `thread_group`, one of whose sums may fail before the others see it."""

import torch

from tests.support.thread_group import ThreadGroup, thread_groups


class FailingGroup(ThreadGroup):
    """One member. What it adds up is noted."""

    def __init__(self, group: ThreadGroup) -> None:
        super().__init__(group._meeting, group.rank)
        self.shapes: list[tuple[int, ...]] = []
        self._failures: dict[int, Exception] = {}

    def fail_at(self, number: int, error: Exception | None = None) -> None:
        """The next sum but `number` fails, before anything is sent: for want of memory unless `error` says otherwise.
        What is summed instead counts as well."""
        self._failures[number] = error or RuntimeError("out of memory")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        failure = self._failures.pop(0, None)
        self._failures = {number - 1: error for number, error in self._failures.items()}
        if failure is not None:
            raise failure
        self.shapes.append(tuple(x.shape))
        return super().all_reduce(x)


def failing_groups(size: int) -> list[FailingGroup]:
    """The members of one group."""
    return [FailingGroup(group) for group in thread_groups(size)]
