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
from tokenmill_engine.outputs import KVCapacity, StepHandle, StepPlan, StepResult, TokenMasks
from tokenmill_engine.worker.runner import LaunchedStep, PendingStep, execute_masked
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
        self._unmasked: _DeviceStep | None = None
        """The step submitted last, if its masks are to follow."""

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
        step = _DeviceStep(self._worker, plan)
        self._unmasked = step if plan.masks_follow else None
        return step

    def mask(self, masks: TokenMasks | None) -> None:
        """The masks that follow the plan submitted last. Never raises for what goes wrong with them."""
        if self._steps is not None:
            self._steps.mask(masks)
        elif self._unmasked is not None:
            self._unmasked.mask(masks)
            self._unmasked = None

    def shutdown(self) -> None:
        """Finish the submitted steps and let go of the device. May be called twice."""
        if self._steps is not None:
            self._steps.stop()
            self._steps = None
        self._worker.close()


class _DeviceStep:
    """A step on its way through the device's queue, as far as it can be without its masks."""

    def __init__(self, worker: Worker, plan: StepPlan) -> None:
        self._step = plan.step
        self._launched: LaunchedStep | None = None
        self._pending: PendingStep | None = None
        self._failure: EngineError | None = None
        try:
            if plan.masks_follow:
                self._launched = worker.launch(plan)
            else:
                self._pending = worker.execute(plan)
        except Exception as error:
            self._fail(error)

    def mask(self, masks: TokenMasks | None) -> None:
        """Enqueue the rest."""
        if self._launched is None:
            return
        try:
            self._pending = self._launched.choose(masks)
        except Exception as error:
            self._fail(error)

    def result(self) -> StepResult:
        if self._failure is not None:
            raise self._failure
        if self._pending is None:
            raise RuntimeError(f"step {self._step} has no masks yet")
        try:
            return self._pending.wait()
        except Exception as error:
            raise as_engine_error(error, self._step) from error

    def _fail(self, error: Exception) -> None:
        """It could not be enqueued."""
        logger.exception("step %d failed", self._step)
        self._failure = as_engine_error(error, self._step)


class _StepThread:
    """A thread that owns the worker: it starts it, then runs its steps one after the other."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._queue: SimpleQueue[tuple[StepPlan, Future[StepResult]] | None] = SimpleQueue()
        self._masks: SimpleQueue[TokenMasks | None] = SimpleQueue()
        self._awaits_masks = False
        """By the plan submitted last."""
        self._ready: Future[KVCapacity] = Future()
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def initialize(self) -> KVCapacity:
        self._thread.start()
        return self._ready.result()

    def submit(self, plan: StepPlan) -> StepHandle:
        future: Future[StepResult] = Future()
        self._queue.put((plan, future))
        self._awaits_masks = plan.masks_follow
        return future

    def mask(self, masks: TokenMasks | None) -> None:
        self._masks.put(masks)
        self._awaits_masks = False

    def stop(self) -> None:
        if self._awaits_masks:
            self.mask(None)
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
                future.set_result(self._enqueue(plan).wait())
            except Exception as error:
                logger.exception("step %d failed", plan.step)
                future.set_exception(as_engine_error(error, plan.step))

    def _enqueue(self, plan: StepPlan) -> PendingStep:
        if plan.masks_follow:
            return execute_masked(self._worker, plan, self._masks.get)
        return self._worker.execute(plan)
