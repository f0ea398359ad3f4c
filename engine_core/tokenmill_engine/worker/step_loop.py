"""What a worker's process does with the plans that come: it carries them out in order and answers them in order.
Torch-free.

A device computes while the host goes on, so the next plan is launched while the device still works on the one before:
one thread begins steps as their plans come, another waits for their ends and answers. Where a step has been computed
by the time it has begun, the second thread would only be in the way.

After a failure nothing more is begun until the engine core says that all others have failed alike. Without that another
worker may be in the middle of the step, and would take what comes of a later one for its part.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Queue

from tokenmill_engine.errors import EngineDeadError, EngineError, ExchangeError
from tokenmill_engine.ipc.lifecycle import die_with
from tokenmill_engine.ipc.shared_ring import RingReader, RingWriter
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.worker.runner import PendingStep, StepWorker, execute_masked
from tokenmill_engine.worker.wire import Answer, StepFailure, decode_masks, decode_plan, encode_answer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Begun:
    """A step whose end is still to be waited for."""

    number: int
    plan: StepPlan
    pending: PendingStep
    is_after_others: bool
    """Whether the stages before this worker's are done with the step once its end is reached, or fails."""


class StepLoop:
    """The plans of one worker. Only one rank `reports` results; every rank sends failures."""

    def __init__(
        self,
        worker: StepWorker,
        answers: RingWriter,
        as_engine_error: Callable[[Exception, int], EngineError],
        agreed: threading.Semaphore,
        *,
        reports: bool,
    ) -> None:
        """`as_engine_error`: as in `step_errors`, which imports torch. `agreed` is released for each failure once it is
        known that all have failed alike."""
        self._worker = worker
        self._answers = answers
        self._as_engine_error = as_engine_error
        self._agreed = agreed
        self._reports = reports
        self._has_told_of_loss = False
        self._sending = threading.Lock()
        """The ring has one writer, and there may be two threads."""
        self._begun: Queue[_Begun | StepFailure] = Queue()

    def run(self, plans: RingReader) -> None:
        """Carry out plans until an empty message comes and all before it are answered."""
        if not self._reports:
            # Who reports sees in its own results what it lacks.
            self._worker.tell_missing(self._send)
        runs_ahead = self._worker.runs_ahead
        if runs_ahead:
            threading.Thread(target=die_with, args=(self._answer_all,), name="answers", daemon=True).start()
        following = iter(plans.receive, None)
        for number in itertools.count():
            message = plans.receive()
            if not message:
                break
            step = self._begin(number, decode_plan(message, following), lambda: decode_masks(plans.receive()))
            if not runs_ahead:
                self._answer(step)
                continue
            self._begun.put(step)
            if isinstance(step, StepFailure):
                # Until it is told, and all are known to have failed alike.
                self._begun.join()
        self._begun.join()

    def _begin(self, number: int, plan: StepPlan, masks: Callable[[], TokenMasks | None]) -> _Begun | StepFailure:
        """`masks` waits for those that follow the plan, if any do."""
        try:
            worker = self._worker
            pending = execute_masked(worker, plan, masks) if plan.masks_follow else worker.execute(plan)
        except Exception as error:
            return self._failure(number, plan, error, self._worker.received_step == plan.step)
        return _Begun(number, plan, pending, self._worker.received_step == plan.step)

    def _answer_all(self) -> None:
        """The work of the second thread, for as long as the process lives."""
        self._worker.enter_thread()
        while True:
            self._answer(self._begun.get())
            self._begun.task_done()

    def _answer(self, step: _Begun | StepFailure) -> None:
        answer = step if isinstance(step, StepFailure) else self._end(step)
        if self._reports or isinstance(answer, StepFailure):
            self._send(answer)
        if isinstance(answer, StepFailure):
            self._agreed.acquire()

    def _send(self, answer: Answer) -> None:
        with self._sending:
            self._answers.send(encode_answer(answer))

    def _end(self, step: _Begun) -> Answer:
        try:
            return step.pending.wait()
        except Exception as error:
            return self._failure(step.number, step.plan, error, step.is_after_others)

    def _failure(self, number: int, plan: StepPlan, error: Exception, is_after_others: bool) -> StepFailure:
        at = time.monotonic()
        if isinstance(error, ExchangeError):
            self._tell_of_loss(plan.step, error)
        else:
            logger.error("step %d failed: %s", plan.step, error, exc_info=error)
        failure = self._as_engine_error(error, plan.step)
        return StepFailure(number, failure.message, at, isinstance(failure, EngineDeadError), is_after_others)

    def _tell_of_loss(self, step: int, error: ExchangeError) -> None:
        """What another worker did needs no traceback of ours, and no line for each step that is under way."""
        if not self._has_told_of_loss:
            self._has_told_of_loss = True
            is_wanted = logger.isEnabledFor(logging.DEBUG)
            logger.warning("step %d failed: %s", step, error, exc_info=error if is_wanted else None)
