"""Runs the workers of one model as processes: every plan goes to all of them, results come back from one that samples.

A rank that refuses a step waits for what the others do. A step that all refuse alike has failed, and the next can
follow: they are told to go on. One that only some refuse leaves them in different states, and the others in the middle
of an exchange: then the executor is of no use any more, as when a worker dies. Torch-free: the engine core's process
computes nothing.
"""

import contextlib
import dataclasses
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import EngineDeadError, EngineError
from tokenmill_engine.executor.feedback import TokenFeedback
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.ipc.shared_ring import Message, await_wake_up
from tokenmill_engine.outputs import (
    KVCapacity,
    MissingImages,
    StepHandle,
    StepPlan,
    StepResult,
    TokenMasks,
    without_images,
)
from tokenmill_engine.worker.control import chain_store, stage_store
from tokenmill_engine.worker.wire import StepFailure, decode_answer, encode_masks, encode_plan

_VERDICT_S = 3.0
"""From one rank's failure in a step until the others have failed too, if they do so alike."""
_LOSS_S = 1.0
"""How much later than other workers the engine core may notice that one has ended, on a machine that is busy."""


class MultiprocExecutor:
    """The workers of `pool`. Use it from one thread only."""

    def __init__(
        self,
        config: EngineConfig,
        pool: WorkerPool,
        engine_rank: int,
        store_path: str,
        on_lost: Callable[[EngineDeadError], None],
    ) -> None:
        """`store_path`: what files begin with that are not there yet, in a folder that outlives the workers. `on_lost`
        is called in another thread when a worker ends, also while nobody waits for a step."""
        self._config = config
        self._pool = pool
        self._engine_rank = engine_rank
        self._store_path = store_path
        self._on_lost = on_lost
        self._num_submitted = 0
        self._awaits_masks = False
        """By the plan submitted last."""
        self._reporter = config.parallel.reporting_rank
        self._num_answered = 0
        """By the rank that sends results, in the order of submission."""
        self._answered_at = 0.0
        """When it did last, of the monotonic clock."""
        self._feedback = TokenFeedback() if config.parallel.pipeline_parallel_size > 1 else None
        """For the stages that do not sample."""
        self._missing: dict[int, list[MissingImages]] = {}
        """By `StepPlan.step`: what other workers than the reporter could not encode."""
        self._results: dict[int, StepResult] = {}
        """By number of the step: those that nobody has asked for yet."""
        self._failures: dict[int, dict[int, StepFailure]] = {}
        """By number of the step and rank: those that are not known to be shared by all."""
        self._refused: dict[int, str] = {}
        """By number of the step: why all refused it alike. Those that nobody has asked for yet."""
        self._death: str | None = None
        self._is_shut = False
        self._poller = select.poll()
        self._poller.register(pool.wake, select.POLLIN)

    def initialize(self) -> KVCapacity:
        """Make the workers ready.

        Raises:
            StartupError: one of them cannot start.
        """
        began = time.monotonic()
        try:
            capacities = self._pool.start(self._config, self._engine_rank, self._store_path)
        except BaseException:
            self._end_workers(gently=False)
            raise
        finally:
            self._remove_stores()
        first = capacities[self._reporter]
        if any(_shape(capacity) != _shape(first) for capacity in capacities):
            raise RuntimeError(f"the workers offer different KV caches: {[_shape(each) for each in capacities]}")
        self._pool.watch(lambda message: self._on_lost(EngineDeadError(message)))
        waiting_s = time.monotonic() - began - sum(first.phases.values())
        phases = {"import": max(0.0, waiting_s), **first.phases}
        return dataclasses.replace(first, phases=phases, prefill_costs=slowest_costs(capacities))

    def submit(self, plan: StepPlan) -> StepHandle:
        """Hand a step to the workers, behind those submitted before. Never raises for what goes wrong with it."""
        number = self._num_submitted
        self._num_submitted += 1
        if self._death is None:
            sent = plan if self._feedback is None else dataclasses.replace(plan, sampled=self._feedback.sent(plan))
            self._send(encode_plan(sent))
            self._awaits_masks = plan.masks_follow
        return _Step(self, number, plan)

    def mask(self, masks: TokenMasks | None) -> None:
        """The masks that follow the plan submitted last. Never raises for what goes wrong with them."""
        self._awaits_masks = False
        if self._death is None:
            self._send([encode_masks(masks)])

    def shutdown(self) -> None:
        """Finish the submitted steps and end the workers. May be called twice."""
        if self._is_shut:
            return
        if self._awaits_masks:
            self.mask(None)
        try:
            while self._num_answered < self._num_submitted:
                self._wait()
                self._collect()
                self._check_agreement(self._num_answered)
            self._pool.expect_ends()
            self._pool.plans.send(b"", self._make_room)
        except EngineDeadError as error:
            self._death = error.message
        self._end_workers(gently=self._death is None)

    def _send(self, messages: Sequence[Message]) -> None:
        try:
            for message in messages:
                self._pool.plans.send(message, self._make_room)
        except EngineDeadError as error:
            self._death = error.message

    def _end_workers(self, gently: bool) -> None:
        self._is_shut = True
        self._pool.stop(gently)
        self._death = self._death or "the workers were ended"

    def result(self, number: int, plan: StepPlan) -> StepResult:
        """Wait for step `number`, which carries out `plan`. To be called once for each step, in order.

        Raises:
            EngineError: all ranks refused it alike, or all of the last stage.
            EngineDeadError: a worker is gone, or the ranks disagree about this step or an earlier one.
        """
        while True:
            self._collect()
            self._check_agreement(number)
            if number in self._refused:
                self._missing.pop(plan.step, None)
                raise EngineError(self._refused.pop(number))
            if number in self._results and number not in self._failures:
                result = self._results.pop(number)
                if result.step in self._missing:
                    result = without_images(result, self._missing.pop(result.step))
                if self._feedback is not None:
                    self._feedback.received(plan, result)
                return result
            self._wait()

    def _check_agreement(self, number: int) -> None:
        """Raises EngineDeadError if some ranks have refused a step up to `number` and others have not, or not for the
        same reason, or not in time."""
        for failed, failures in self._failures.items():
            if failed > number:
                continue
            may_follow = (
                failed == number and failed not in self._results and time.monotonic() < self._deadline(failures)
            )
            if not (may_follow and _is_alike(failures)):
                self._die()

    def _is_shared(self, failures: dict[int, StepFailure]) -> bool:
        """Whether no rank is in the middle of the step: all refused it, or those of the last stage did when the others
        were done with it."""
        is_late = bool(failures) and all(failure.is_after_others for failure in failures.values())
        return failures.keys() == set(range(self._reporter if is_late else 0, self._pool.size))

    def _die(self) -> NoReturn:
        """For a failure that is not shared by all, or a worker that is lost."""
        self._pool.wait_for_loss(_LOSS_S)
        self._collect()
        self._death = self._reason()
        raise EngineDeadError(self._death)

    def _reason(self) -> str:
        """Why no step can work any more. Who failed first is to blame. But a device or a connection may be lost because
        a worker has ended, and after that anything may fail."""
        told = [each for failures in self._failures.values() for each in failures.items()]
        lost = self._pool.lost
        if lost is not None:
            told = [each for each in told if not each[1].is_final and each[1].at < self._pool.lost_at]
            if not told:
                return lost
        rank, failure = min(told, key=lambda each: (each[1].is_final, each[1].at))
        name = self._pool.name(rank)
        is_named = self._pool.size == 1 or failure.message.startswith(name)
        return failure.message if is_named else f"{name}: {failure.message}"

    def _collect(self) -> None:
        """Take in what workers have answered. Who sends results is read first: another rank that has failed or lacks
        images, and by going on has made a result wrong, wrote that before the result was written, so it is there."""
        if self._is_shut:
            return
        for rank in (self._reporter, *(rank for rank in range(self._pool.size) if rank != self._reporter)):
            ring = self._pool.answers[rank]
            while (message := ring.take()) is not None:
                answer = decode_answer(message)
                if isinstance(answer, MissingImages):
                    self._missing.setdefault(answer.step, []).append(answer)
                elif isinstance(answer, StepFailure):
                    self._failures.setdefault(answer.number, {})[rank] = answer
                else:
                    self._results[self._num_answered] = answer
                if rank == self._reporter:
                    self._num_answered += 1
                    self._answered_at = time.monotonic()
        for number, failures in list(self._failures.items()):
            if self._is_shared(failures) and _is_alike(failures):
                self._refused[number] = next(iter(failures.values())).message
                self._pool.go_on(self._failures.pop(number))

    def _patience_s(self) -> float | None:
        """How long there is reason to wait for all ranks to refuse a step that the reporter has come to; None: there is
        no such step."""
        deadlines = [self._deadline(each) for number, each in self._failures.items() if number <= self._num_answered]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _deadline(self, failures: dict[int, StepFailure]) -> float:
        """Until when the ranks that have not failed in a step yet may do so, of the monotonic clock. Later stages come
        to the step when they are done with those before it."""
        return max(self._answered_at, min(failure.at for failure in failures.values())) + _VERDICT_S

    def _remove_stores(self) -> None:
        parallel = self._config.parallel
        stores = [stage_store(self._store_path, stage) for stage in range(parallel.pipeline_parallel_size)]
        stores += [chain_store(self._store_path, member) for member in range(parallel.tensor_parallel_size)]
        for store in stores:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._pool.lost is not None:
            self._die()

    def _wait(self) -> None:
        """Until a worker has answered, or there is no point in waiting any longer for all to refuse a step.

        Raises:
            EngineDeadError: no answer can come any more.
        """
        self._check_alive()
        timeout_s = self._patience_s()
        if timeout_s is None or self._poller.poll(timeout_s * 1000):
            await_wake_up(self._pool.wake)

    def _make_room(self) -> None:
        """Wait until the ring of plans may have space. Answers are taken in meanwhile: a worker that cannot write its
        answer reads no plan, nor does one that waits after a failure."""
        poller = select.poll()
        for fd in (self._pool.wake, self._pool.space):
            poller.register(fd, select.POLLIN)
        timeout_s = self._patience_s()
        for fd, _ in poller.poll(None if timeout_s is None else timeout_s * 1000):
            await_wake_up(fd)
        self._collect()
        self._check_alive()
        if self._patience_s() == 0:
            self._die()


class _Step:
    """A step that the workers know of."""

    def __init__(self, executor: MultiprocExecutor, number: int, plan: StepPlan) -> None:
        self._executor = executor
        self._number = number
        self._plan = plan

    def result(self) -> StepResult:
        return self._executor.result(self._number, self._plan)


def _is_alike(failures: dict[int, StepFailure]) -> bool:
    """Whether the next step can work though this one has failed, as far as these ranks tell."""
    return len({failure.message for failure in failures.values()}) == 1 and not any(
        failure.is_final for failure in failures.values()
    )


def _shape(capacity: KVCapacity) -> tuple[int, int, int]:
    """What all ranks must have alike."""
    return capacity.num_blocks, capacity.block_size, capacity.max_model_len


def slowest_costs(capacities: Sequence[KVCapacity]) -> tuple[tuple[int, float], ...]:
    """`prefill_costs` of the workers together: of each size, of the one that took longest. Stages work at once, on
    different steps, and members of a stage wait for each other."""
    columns = zip(*(capacity.prefill_costs for capacity in capacities), strict=True)
    return tuple((column[0][0], max(seconds for _, seconds in column)) for column in columns)
