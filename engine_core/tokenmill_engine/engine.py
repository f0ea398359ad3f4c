"""One engine core: takes client messages in, runs steps, and says what each API server is to be told.

Knows nothing of sockets and processes (`process`), of devices (the executor) or of text. One thread uses it.
"""

import logging
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import EngineDeadError, EngineError, NotBegunError, RequestError, TokenmillError
from tokenmill_engine.ipc.ids import client_of, incarnation_of, is_of
from tokenmill_engine.kv_cache.events import BlockJournal
from tokenmill_engine.kv_cache.manager import KVCacheManager
from tokenmill_engine.media_store import MediaStore
from tokenmill_engine.messages import (
    AbortRequests,
    AddRequest,
    ClientGone,
    ClientMessage,
    EngineLoad,
    Finish,
    FinishReason,
    Hello,
    MediaMissing,
    ReportsMissed,
    StepOutput,
)
from tokenmill_engine.outputs import KVCapacity, StepHandle, StepPlan, StepResult, TokenMasks
from tokenmill_engine.recorder import Recorder
from tokenmill_engine.reports import Output, Reporter
from tokenmill_engine.request import Request, RequestLimits, build_request
from tokenmill_engine.scheduler.budget import make_budget
from tokenmill_engine.scheduler.encoder_budget import comparable_s
from tokenmill_engine.scheduler.outcome import StepOutcome
from tokenmill_engine.scheduler.packing import pack_outcome
from tokenmill_engine.scheduler.scheduler import Scheduler
from tokenmill_engine.scheduler.turns import steps_under_way
from tokenmill_engine.structured_output.grammar import GrammarError
from tokenmill_engine.structured_output.requests import StructuredRequests

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs steps on a model, strictly in the order in which they were submitted."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step; returns before it is done."""

    def mask(self, masks: TokenMasks | None) -> None:
        """The masks that follow the plan submitted last, by `StepPlan.masks_follow`."""

    def shutdown(self) -> None:
        """Finish the submitted steps, at most as many as the pipeline is deep, and let the device go."""


class EngineCore:
    """Scheduler and executor in a pipeline: with asynchronous scheduling, step n + 1 is prepared while n runs. Where
    the model is in stages, one step is in each of them.

    `capacity` is what the executor's worker offers, `engine` the number that API servers know it by. `began` is when
    the start did, of the monotonic clock; None if nobody is to be told how long it takes. `wake` is called, in any
    thread, when `step` has something to do that no message said.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        capacity: KVCapacity,
        engine: int = 0,
        began: float | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        caching = config.cache.enable_prefix_caching
        self._is_balanced = config.data_parallel_size > 1
        journal = BlockJournal() if self._is_balanced and caching else None
        kv = KVCacheManager(capacity.num_blocks, capacity.block_size, len(capacity.groups), caching, journal)
        self._engine = engine
        self._executor = executor
        self._limits = RequestLimits(
            max_model_len=min(capacity.max_model_len, kv.max_tokens),
            vocab_size=config.model.architecture.vocab_size,
            eos_token_ids=config.model.eos_token_ids,
            media=config.model.media,
            max_item_tokens=config.scheduler.max_item_tokens,
            num_positions=config.model.num_positions,
            makes_vectors=config.model.pooling is not None,
        )
        num_stages = config.parallel.pipeline_parallel_size
        self._depth = steps_under_way(num_stages, config.scheduler.async_scheduling)
        self._runs_ahead = num_stages == 1
        """Whether a request is computed again while its last token is in flight."""
        steps_per_token = self._depth if num_stages > 1 else 1
        self._budget = make_budget(config.scheduler, capacity.prefill_costs, steps_per_token)
        self.scheduler = Scheduler(
            config.scheduler, self._budget, kv, self._limits.max_model_len, config.model.eos_token_ids, num_stages
        )
        self._seeds = random.Random(f"{config.model.seed}/{config.rank_of(engine)}")
        self.media = MediaStore(config.media_store_bytes)
        self._structured = StructuredRequests(config, wake)
        self._awaited: set[int] = set()
        """Requests that are to come again, with their media."""
        self._in_flight: deque[tuple[StepPlan, StepHandle]] = deque()
        self._outbox: list[Output] = []
        self._reporter = Reporter(engine, kv.pool, journal, counts_requests=self._is_balanced)
        self._recorder = Recorder(config, capacity, config.rank_of(engine))
        self._ready = None if began is None else began + sum(capacity.phases.values())
        """When the phases of the start but the last were over."""
        logger.info("token budget: %s", self._budget.describe())

    @property
    def has_work(self) -> bool:
        """Whether `step` would do more than report."""
        return self.scheduler.num_unfinished > 0 or bool(self._in_flight)

    def handle(self, message: ClientMessage) -> None:
        """Take a client's message in; what there is to answer comes out of the next `step`."""
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequests(request_ids=request_ids, reason=reason):
                self._abort(request_ids, reason)
            case ClientGone(client=client, incarnation=incarnation):
                self._abort_all(client, incarnation)
                self._reporter.remove_listener(client, incarnation)
            case ReportsMissed(client=client, incarnation=incarnation):
                self._reporter.begin_anew(client, incarnation)
            case Hello(client=client, incarnation=incarnation):
                self._abort_all(client, incarnation)
                is_new = self._reporter.add_listener(client, incarnation)
                # Not one that connects again, or takes the place of another, long after the start.
                if self._ready is not None and is_new and incarnation == 0:
                    self._recorder.record_serve(time.monotonic() - self._ready)

    def step(self) -> list[Output]:
        """Keep the executor busy and finish the oldest step in flight, if there is one. Returns what to send.

        Raises:
            EngineDeadError: the device is lost.
        """
        self._schedule_structured()
        self._fill_pipeline()
        outcome = self._finish_oldest_step() if self._in_flight else None
        self._end_failures()
        if outcome is None and self.scheduler.num_unfinished:
            raise RuntimeError(f"{self.scheduler.num_unfinished} requests are left, yet there is nothing to do")
        load = self._load()
        self._recorder.set_load(load)
        outbox, self._outbox = self._outbox, []
        if outcome is not None:
            outbox.extend(pack_outcome(outcome, self._engine, load, self._reporter.num_received).items())
        self._reporter.report(outbox, load)
        return outbox

    def log_stats(self) -> None:
        """Log throughput and load since the last call; not worth INFO if nothing happened."""
        self._recorder.log_stats(self.scheduler)

    def shutdown(self) -> None:
        """Let the device go once it is done with the steps in flight; unfinished requests are not answered."""
        self._executor.shutdown()
        self._structured.close()

    def _add(self, message: AddRequest) -> None:
        if message.request_id in self._awaited:
            self._awaited.discard(message.request_id)
        else:
            self._reporter.count_request(message.request_id)
        if self.scheduler.find(message.request_id) is not None:
            logger.error("request id %d is in use already; the second one is dropped", message.request_id)
            return
        media = self.media.complete(message.media)
        if media is None:
            self._await_media(message.request_id)
            return
        try:
            request = build_request(msgspec.structs.replace(message, media=media), self._limits, self._seeds)
        except RequestError as error:
            self._refuse(message.label, message.request_id, error)
            return
        request.queued_time = time.monotonic()
        self.media.hold(request.request_id, request.media)
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """A request whose output follows a grammar waits until that is compiled, and holds nobody up."""
        spec = request.sampling.structured
        try:
            if spec is None or self._structured.admit(request, spec):
                self.scheduler.add(request)
        except GrammarError as error:
            self._refuse_structured(request, error)

    def _schedule_structured(self) -> None:
        for request, error in self._structured.ready():
            if error is None:
                self.scheduler.add(request)
            else:
                self._refuse_structured(request, error)

    def _refuse_structured(self, request: Request, error: TokenmillError) -> None:
        self.media.release(request.request_id)
        self._refuse(request.label, request.request_id, error)

    def _end_failures(self) -> None:
        """Requests whose grammar cannot be followed any further."""
        for request_id, error in self._structured.failures():
            self._abort([request_id], FinishReason.ERROR)
            self._tell_refused(request_id, error)

    def _refuse(self, label: str, request_id: int, error: TokenmillError) -> None:
        level = logging.DEBUG if isinstance(error, GrammarError) else logging.WARNING  # it quotes its author
        logger.log(level, "request %s (%d) refused: %s", label, request_id, error)
        self._recorder.record_refusal()
        self._tell_refused(request_id, error)

    def _await_media(self, request_id: int) -> None:
        """All requests of an API server since the last step are asked for together: choices share their media."""
        self._awaited.add(request_id)
        client = client_of(request_id)
        for addressee, message in self._outbox:
            if isinstance(message, MediaMissing) and is_of(
                request_id, addressee, incarnation_of(message.request_ids[0])
            ):
                message.request_ids.append(request_id)
                return
        self._outbox.append((client, MediaMissing(self._engine, [request_id])))

    def _tell_refused(self, request_id: int, error: TokenmillError) -> None:
        """Only what is wrong with a grammar is the client's to mend: all else the front end should have refused."""
        client = client_of(request_id)
        param = error.param if isinstance(error, GrammarError) else None
        retry_after_s = error.retry_after_s if isinstance(error, NotBegunError) else None
        output = StepOutput(
            engine=self._engine,
            request_ids=np.array([request_id], dtype="<i8").tobytes(),
            num_tokens=np.zeros(1, dtype="<i4").tobytes(),
            token_ids=b"",
            load=self._reporter.load_for(client, self._load()),
            finishes=[Finish(0, FinishReason.ERROR, message=error.message, param=param, retry_after_s=retry_after_s)],
        )
        self._outbox.append((client, output))

    def _abort_all(self, client: int, incarnation: int) -> None:
        """This incarnation of an API server wants nothing any more."""
        request_ids = [*self.scheduler.request_ids_of(client, incarnation)]
        elsewhere = [*self._awaited, *self._structured.waiting_ids]
        request_ids += [each for each in elsewhere if is_of(each, client, incarnation)]
        self._abort(request_ids, FinishReason.ABORT)

    def _abort(self, request_ids: list[int], reason: FinishReason) -> None:
        for request_id in request_ids:
            self._awaited.discard(request_id)
            request = self._structured.forget(request_id, reason) or self.scheduler.abort(request_id, reason)
            if request is not None:
                self.media.release(request_id)
                logger.debug("request %s (%d) ended by its client: %s", request.label, request_id, reason)
                self._recorder.record_finish(request, time.monotonic())

    def _fill_pipeline(self) -> None:
        while len(self._in_flight) < self._depth:
            decision = self.scheduler.schedule()
            if decision is None:
                return
            plan = self.scheduler.apply(decision)
            masked = self._structured.masked(plan, tokens_in_flight=self._runs_ahead and bool(self._in_flight))
            self._in_flight.append((plan, self._executor.submit(masked)))
            self.scheduler.foresee(self._structured.known_tokens())

    def _finish_oldest_step(self) -> StepOutcome:
        """Wait for the oldest step in flight and take its result in."""
        plan, handle = self._in_flight.popleft()
        try:
            result = handle.result()
            outcome = self.scheduler.commit(plan, result)
            self._learn(plan, result)
        except EngineDeadError:
            raise
        except EngineError as error:
            logger.error("step %d failed, its %d requests end with an error: %s", plan.step, plan.num_reqs, error)
            outcome = self.scheduler.fail_step(plan, error.message)
        for request, _ in outcome.finished.values():
            self.media.release(request.request_id)
            self._structured.forget(request.request_id, FinishReason.STOP)
        self._structured.take(outcome.request_ids, outcome.num_tokens, outcome.token_ids)
        if self._structured.owes_masks:
            # The step behind this one has been computed as far as it can be without them, or soon will.
            self._executor.mask(self._structured.late_masks())
            self.scheduler.foresee(self._structured.known_tokens())
        self._recorder.record_step(plan, outcome, self.scheduler)
        return outcome

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """What a step teaches about the next ones."""
        self._budget.observe(plan, comparable_s(plan, result.elapsed_s))
        self._recorder.record_device(result.elapsed_s, result.encoder_s, self._budget.mixed_tokens)

    def _load(self) -> EngineLoad:
        load = self.scheduler.load
        if self._structured.num_waiting:
            load = msgspec.structs.replace(load, num_waiting=load.num_waiting + self._structured.num_waiting)
        if not self._is_balanced:
            return load
        return msgspec.structs.replace(load, num_waiting_tokens=self.scheduler.num_waiting_tokens)
