"""Steps of workers whose kernels wait for each other."""

from collections.abc import Iterator
from contextlib import contextmanager

from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.worker.runner import LaunchedStep, PendingStep, Runner
from tokenmill_engine.worker.step_ring import StepRing


class RunnerTogether:
    """A `Runner`. A step that fails once the device was told of it is the last one: other workers may have failed
    elsewhere in it, for want of memory, say, and whoever got further has kernels that wait for what will never come."""

    def __init__(self, runner: Runner, ring: StepRing) -> None:
        self._runner, self._ring = runner, ring

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step.

        Raises:
            EngineDeadError: it failed half-way.
            Exception: all workers refuse it alike.
        """
        with self._in_step(plan.step):
            return self._runner.execute(plan)

    def launch(self, plan: StepPlan) -> "LaunchedTogether":
        """As `Runner`. Raises as `execute` does."""
        with self._in_step(plan.step):
            return LaunchedTogether(self._runner.launch(plan), plan.step)

    @contextmanager
    def _in_step(self, step: int) -> Iterator[None]:
        before = self._ring.num_counted
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            if self._ring.num_counted == before:
                raise
            raise _failed_half_way(step, error) from error


class LaunchedTogether:
    """A step that the device was told of."""

    def __init__(self, launched: LaunchedStep, step: int) -> None:
        self._launched, self._step = launched, step

    def choose(self, masks: TokenMasks | None) -> PendingStep:
        """As `LaunchedStep`. Raises EngineDeadError if it fails."""
        try:
            return self._launched.choose(masks)
        except EngineDeadError:
            raise
        except Exception as error:
            raise _failed_half_way(self._step, error) from error


def _failed_half_way(step: int, error: Exception) -> EngineDeadError:
    return EngineDeadError(f"step {step} failed half-way: {type(error).__name__}: {error}")
