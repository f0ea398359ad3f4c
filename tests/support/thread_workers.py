"""Workers that have a model between them, in threads of one process: every plan goes to all of them."""

from collections.abc import Sequence

import numpy as np

from tests.support.thread_group import ThreadGroup, on_every_rank, thread_groups
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.outputs import KVCapacity, LogprobRows, StepPlan, StepResult
from tokenmill_engine.worker.worker import Worker


class ThreadWorkers:
    """Initialized workers. What they answer must be the same: nobody tells the others what was sampled."""

    def __init__(self, configs: Sequence[EngineConfig]) -> None:
        """One for each worker."""
        self.groups = thread_groups(len(configs))
        self._workers = [Worker(config, 0, group) for config, group in zip(configs, self.groups, strict=True)]
        self.capacities: list[KVCapacity] = on_every_rank(self.groups, self._initialize)

    def submit(self, plan: StepPlan) -> "_Done":
        results = on_every_rank(self.groups, lambda group: self._workers[group.rank].execute(plan).wait())
        for result in results[1:]:
            _check_same(results[0], result)
        return _Done(results[0])

    def _initialize(self, group: ThreadGroup) -> KVCapacity:
        return self._workers[group.rank].initialize()


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


def _check_same(first: StepResult, other: StepResult) -> None:
    assert (other.step, other.errors) == (first.step, first.errors)
    np.testing.assert_array_equal(other.num_new, first.num_new)
    np.testing.assert_array_equal(other.token_ids, first.token_ids)
    _check_same_scores(first.logprobs, other.logprobs)
    _check_same_scores(first.prompt_logprobs, other.prompt_logprobs)


def _check_same_scores(first: dict[int, LogprobRows], other: dict[int, LogprobRows]) -> None:
    assert other.keys() == first.keys()
    for row, scores in first.items():
        np.testing.assert_array_equal(other[row].token_ids, scores.token_ids)
        np.testing.assert_array_equal(other[row].logprobs, scores.logprobs)
        np.testing.assert_array_equal(other[row].ranks, scores.ranks)
