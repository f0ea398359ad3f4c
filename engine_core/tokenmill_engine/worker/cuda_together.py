"""Steps of workers whose kernels wait for each other."""

from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.runner import PendingStep, Runner
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
        before = self._ring.num_counted
        try:
            return self._runner.execute(plan)
        except EngineDeadError:
            raise
        except Exception as error:
            if self._ring.num_counted == before:
                raise
            raise EngineDeadError(f"step {plan.step} failed half-way: {type(error).__name__}: {error}") from error
