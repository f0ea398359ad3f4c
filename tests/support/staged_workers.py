"""The stages of a model as threads of one process, which talk through gloo as the workers' processes do."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.distributed.torch_group import TorchGroup, join
from tokenmill_engine.executor.feedback import TokenFeedback
from tokenmill_engine.outputs import KVCapacity, StepPlan, StepResult
from tokenmill_engine.worker.worker import Worker

T = TypeVar("T")


class StagedWorkers:
    """An executor over one worker for each stage that `config.parallel` asks for."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """`folder` is where the stages find each other."""
        num_stages = config.parallel.pipeline_parallel_size
        self._feedback = TokenFeedback()
        self._threads = [ThreadPoolExecutor(1, f"stage {stage}") for stage in range(num_stages)]
        store = folder / "stages"

        def start(stage: int) -> tuple[Worker, TorchGroup, KVCapacity]:
            chain = join(stage, num_stages, store)
            worker = Worker(config, chain=chain)
            return worker, chain, worker.initialize()

        starts = self._everywhere(lambda stage: lambda: start(stage))
        self.workers, self._chains, self.capacities = zip(*(each.result() for each in starts), strict=True)

    def submit(self, plan: StepPlan) -> "_StagedStep":
        sent = dataclasses.replace(plan, sampled=self._feedback.sent(plan))
        steps = self._everywhere(lambda stage: lambda: self.workers[stage].execute(sent).wait())
        return _StagedStep(plan, steps, self._feedback)

    def shutdown(self) -> None:
        for chain in self._chains:
            chain.close()
        for thread in self._threads:
            thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _everywhere(self, work: Callable[[int], Callable[[], T]]) -> list[Future[T]]:
        return [thread.submit(work(stage)) for stage, thread in enumerate(self._threads)]


class _StagedStep:
    """A step on its way through the stages."""

    def __init__(self, plan: StepPlan, steps: list[Future[StepResult]], feedback: TokenFeedback) -> None:
        self._plan, self._steps, self._feedback = plan, steps, feedback

    def result(self) -> StepResult:
        *earlier, result = [step.result() for step in self._steps]
        assert not any(other.num_new.any() for other in earlier)
        self._feedback.received(self._plan, result)
        return result
