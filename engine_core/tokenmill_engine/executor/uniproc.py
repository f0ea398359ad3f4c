"""Runs a worker inside the calling process: one device, no extra hop.

On a GPU `submit` enqueues the step from the caller's thread; a CPU step occupies its thread, so one thread of the
executor's own takes the steps in turn. Either way steps run in the order of submission, and the caller can plan the
next one meanwhile.
"""

import logging
import threading
from concurrent.futures import Future
from queue import SimpleQueue

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import EngineError
from tokenmill_engine.ipc.shared_objects import NOTHING_SHARED, SharedObjects
from tokenmill_engine.outputs import KVCapacity, StepHandle, StepPlan, StepResult
from tokenmill_engine.worker.runner import PendingStep
from tokenmill_engine.worker.step_errors import as_engine_error
from tokenmill_engine.worker.worker import Worker

logger = logging.getLogger(__name__)


class UniprocExecutor:
    """One worker. Submit from one thread only."""

    def __init__(self, config: EngineConfig, device_index: int = 0, shared: SharedObjects = NOTHING_SHARED) -> None:
        """`shared`: as in `Worker`."""
        self._worker = Worker(config, device_index, shared=shared)
        self._steps: _StepThread | None = None
        self._on_cpu = config.device.kind == "cpu"

    def initialize(self) -> KVCapacity:
        """Make the worker ready.

        Raises:
            ConfigError: the checkpoint does not fit the configuration.
            StartupError: the machine cannot give what the configuration asks for.
        """
        if not self._on_cpu:
            return self._worker.initialize()
        self._steps = _StepThread(self._worker)
        return self._steps.initialize()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those submitted before. Never raises for what goes wrong in the step."""
        if self._steps is not None:
            return self._steps.submit(plan)
        try:
            return _DeviceStep(self._worker.execute(plan), plan.step)
        except Exception as error:
            logger.exception("step %d failed", plan.step)
            return _FailedStep(as_engine_error(error, plan.step))

    def shutdown(self) -> None:
        """Finish the submitted steps and let go of the device. May be called twice."""
        if self._steps is not None:
            self._steps.stop()
            self._steps = None
        self._worker.close()


class _FailedStep:
    """A step that could not be enqueued."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class _DeviceStep:
    """A step on its way through the device's queue."""

    def __init__(self, pending: PendingStep, step: int) -> None:
        self._pending = pending
        self._step = step

    def result(self) -> StepResult:
        try:
            return self._pending.wait()
        except Exception as error:
            raise as_engine_error(error, self._step) from error


class _StepThread:
    """A thread that owns the worker: it starts it, then runs its steps one after the other."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._queue: SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = SimpleQueue()
        self._ready: Future[KVCapacity] = Future()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def initialize(self) -> KVCapacity:
        self._thread.start()
        return self._ready.result()

    def submit(self, plan: StepPlan) -> StepHandle:
        future: Future[StepResult] = Future()
        self._queue.put((plan, future))
        return future

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            capacity = self._worker.initialize()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(capacity)
        while (entry := self._queue.get()) is not None:
            plan, future = entry
            try:
                future.set_result(self._worker.execute(plan).wait())
            except Exception as error:
                logger.exception("step %d failed", plan.step)
                future.set_exception(as_engine_error(error, plan.step))
