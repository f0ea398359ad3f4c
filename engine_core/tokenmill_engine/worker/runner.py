"""What carries step plans out, as those see it who hand them in and wait for results. Torch-free."""

import contextlib
from collections.abc import Callable
from typing import Protocol

from tokenmill_engine.outputs import MissingImages, StepPlan, StepResult, TokenMasks


class PendingStep(Protocol):
    """A step whose work is enqueued."""

    def wait(self) -> StepResult:
        """Blocks until the device is done with the step. Call it once."""


class LaunchedStep(Protocol):
    """A step whose work is enqueued up to the choice of tokens."""

    def choose(self, masks: TokenMasks | None) -> PendingStep:
        """Enqueue the rest; `masks` are those that follow its plan. Call it once, before the next step."""


class Runner(Protocol):
    """Carries plans out, in order."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue one step whose masks follow, as far as it goes without them."""


class StepWorker(Protocol):
    """A ready worker, as its process sees it."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `execute` returns while the device still works on the step."""

    @property
    def received_step(self) -> int | None:
        """Which step, by `StepPlan.step`, the stages before this one have handed on last; None if there is no such
        stage."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """As in `Runner`."""

    def tell_missing(self, tell: Callable[[MissingImages], None]) -> None:
        """Have `tell` called for images that a step goes on without, before any other worker can be done with it."""

    def enter_thread(self) -> None:
        """To be called first by a thread that waits for steps and did not make the worker ready."""


def execute_masked(worker: StepWorker, plan: StepPlan, receive: Callable[[], TokenMasks | None]) -> PendingStep:
    """Enqueue one step whose masks follow. `receive` waits for them; it is called once, whatever goes wrong. What goes
    wrong first is raised."""
    try:
        launched = worker.launch(plan)
    except Exception:
        with contextlib.suppress(Exception):
            receive()
        raise
    return launched.choose(receive())
