"""Drives a scheduler with the fake executor, as the engine does, and collects what every request was told."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.support.fake_executor import EOS, VOCAB_SIZE, FakeExecutor, FakeHandle
from tests.support.simulated_pipeline import SimulatedPipeline
from tokenmill_engine.block_hash import CacheKey, media_spans
from tokenmill_engine.config.engine import SchedulerConfig, SchedulingPolicy
from tokenmill_engine.errors import EngineError
from tokenmill_engine.kv_cache.events import BlockJournal
from tokenmill_engine.kv_cache.manager import KVCacheManager
from tokenmill_engine.messages import FinishReason, MediaItem, SamplingParams
from tokenmill_engine.outputs import MediaPlace, StepPlan
from tokenmill_engine.request import Request, RequestState
from tokenmill_engine.scheduler.budget import make_budget
from tokenmill_engine.scheduler.encoder_budget import comparable_s
from tokenmill_engine.scheduler.outcome import StepOutcome
from tokenmill_engine.scheduler.scheduler import Scheduler
from tokenmill_engine.scheduler.turns import steps_under_way

_Known = dict[int, tuple[Request, Sequence[int]]]
"""By row of a plan, its request and what follows the token that it yields."""


@dataclass
class Told:
    """Everything one request was told."""

    tokens: list[int] = field(default_factory=list)
    logprob_positions: list[int] = field(default_factory=list)
    prompt_logprob_positions: list[int] = field(default_factory=list)
    finishes: list[FinishReason] = field(default_factory=list)
    stop_token_id: int | None = None
    message: str | None = None


@dataclass
class Setting:
    """Size and policy of a small engine."""

    num_blocks: int = 64
    block_size: int = 4
    num_groups: int = 1
    max_num_seqs: int = 8
    budget: int = 64
    policy: SchedulingPolicy = "fcfs"
    depth: int = 2
    """Steps in flight. Of several stages only whether it is more than 1 counts: scheduling is asynchronous then."""
    num_stages: int = 1
    caching: bool = True
    max_model_len: int = 10_000
    explicit_budget: bool = True
    target_itl_ms: float | None = None
    prefill_costs: tuple[tuple[int, float], ...] = ()
    journal: BlockJournal | None = None
    encoder_budget: int = 64
    encoder_cache: int = 64
    whole_images: bool = False
    step_cost: Callable[[StepPlan], float] = lambda plan: 0.0
    """Seconds that the fake device says a step took."""


def make_request(request_id: int, arrival_time: float = 0.0, priority: int = 0) -> Request:
    """A request of one token, for tests that only move it around."""
    return Request(
        request_id=request_id,
        label="",
        prompt_token_ids=np.zeros(1, dtype=np.int32),
        sampling=SamplingParams(),
        stop_token_ids=(),
        cache_key=CacheKey(),
        arrival_time=arrival_time,
        priority=priority,
    )


class Driver:
    """A scheduler and its fake device."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.kv = KVCacheManager(
            setting.num_blocks, setting.block_size, setting.num_groups, setting.caching, setting.journal
        )
        self.max_model_len = min(setting.max_model_len, self.kv.max_tokens)
        config = SchedulerConfig(
            max_num_seqs=setting.max_num_seqs,
            max_num_batched_tokens=setting.budget,
            explicit_budget=setting.explicit_budget,
            target_itl_ms=setting.target_itl_ms,
            policy=setting.policy,
            async_scheduling=setting.depth > 1,
            max_num_encoder_tokens=setting.encoder_budget,
            encoder_cache_tokens=setting.encoder_cache,
            disable_chunked_mm_input=setting.whole_images,
        )
        self.depth = setting.depth
        if setting.num_stages > 1:
            self.depth = steps_under_way(setting.num_stages, setting.depth > 1)
        steps_per_token = self.depth if setting.num_stages > 1 else 1
        self.budget = make_budget(config, setting.prefill_costs, steps_per_token)
        self.scheduler = Scheduler(config, self.budget, self.kv, self.max_model_len, (EOS,), setting.num_stages)
        self.executor = self._make_executor()
        self.told: dict[int, Told] = {}
        self.requests: dict[int, Request] = {}
        """All that were ever added."""
        self.plans: list[StepPlan] = []
        self._media: dict[int, tuple[MediaPlace, ...]] = {}
        """By slot."""
        self._known: dict[int, Mapping[int, Sequence[int]]] = {}
        self._late: _Known = {}
        self._in_flight: deque[tuple[StepPlan, FakeHandle]] = deque()

    def _make_executor(self) -> FakeExecutor:
        setting = self.setting
        size = (setting.num_blocks, setting.block_size, setting.num_groups)
        return (
            FakeExecutor(*size) if setting.num_stages == 1 else SimulatedPipeline(*size, num_stages=setting.num_stages)
        )

    def add(
        self,
        request_id: int,
        prompt: list[int],
        sampling: SamplingParams | None = None,
        priority: int = 0,
        arrival_time: float | None = None,
        cache_salt: str | None = None,
        media: tuple[MediaItem, ...] = (),
        known: Mapping[int, Sequence[int]] | None = None,
    ) -> Request:
        """`known` as in `solo_run`."""
        sampling = sampling or SamplingParams(max_tokens=8)
        room = self.max_model_len - len(prompt)
        max_tokens = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        end_tokens = () if sampling.ignore_eos else (EOS,)
        request = Request(
            request_id=request_id,
            label=f"label-{request_id}",
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            sampling=SamplingParams(**{**values, "max_tokens": max_tokens, "seed": request_id}),
            stop_token_ids=(*end_tokens, *sampling.stop_token_ids),
            cache_key=CacheKey(cache_salt=cache_salt, media=media_spans(media)),
            arrival_time=float(request_id) if arrival_time is None else arrival_time,
            priority=priority,
            media=media,
        )
        assert max(prompt) < VOCAB_SIZE
        self.requests[request_id] = request
        self._known[request_id] = known or {}
        self.told[request_id] = Told()
        self.scheduler.add(request)
        return request

    def abort(self, request_id: int) -> Request | None:
        request = self.scheduler.abort(request_id)
        self.scheduler.check_invariants()
        return request

    def step(self) -> bool:
        """One turn of the engine's loop. False if there was nothing to do."""
        while len(self._in_flight) < self.depth:
            decision = self.scheduler.schedule()
            if decision is None:
                break
            plan = self.scheduler.apply(decision)
            self._check_plan(plan)
            self.plans.append(plan)
            known, is_late = self._known_of(plan), len(self._in_flight) == 1 and self.setting.num_stages == 1
            self._in_flight.append((plan, self.executor.submit(plan)))
            if is_late and self.depth == 2:
                self._late = known
            else:
                self.scheduler.foresee(self._rows(known))
            self.scheduler.check_invariants()
        if not self._in_flight:
            return False
        plan, handle = self._in_flight.popleft()
        try:
            outcome = self.scheduler.commit(plan, handle.result())
            self.budget.observe(plan, comparable_s(plan, self.setting.step_cost(plan)))
        except EngineError as error:
            outcome = self.scheduler.fail_step(plan, str(error))
        self._tell(outcome)
        # As the engine core does: what follows the token of a step is known when the one before it is taken in.
        late, self._late = self._late, {}
        self.scheduler.foresee(self._rows(late))
        self.scheduler.check_invariants()
        return True

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.step():
                assert self.scheduler.num_unfinished == 0
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def solo(self, request: Request) -> list[int]:
        """The request's tokens from a device of its own."""
        alone = Driver(Setting(num_blocks=400, max_model_len=self.max_model_len, depth=1, caching=False))
        alone.add(request.request_id, request.prompt_token_ids.tolist(), request.sampling, media=request.media)
        alone.run()
        return alone.told[request.request_id].tokens

    def _known_of(self, plan: StepPlan) -> _Known:
        known: _Known = {}
        running = {request.slot: request for request in self.requests.values() if request.slot >= 0}
        for row in plan.samples.nonzero()[0].tolist():
            request = running[int(plan.slots[row])]
            index = int(plan.num_computed[row] + plan.num_scheduled[row]) - request.num_prompt_tokens
            if index in self._known[request.request_id]:
                known[row] = request, self._known[request.request_id][index]
        return known

    def _rows(self, known: _Known) -> dict[int, Sequence[int]]:
        """Of requests that have not ended; some may wait again."""
        return {row: token_ids for row, (request, token_ids) in known.items() if request.finish_reason is None}

    def _check_plan(self, plan: StepPlan) -> None:
        assert 0 < plan.num_tokens <= self.setting.budget
        assert self.scheduler.load.num_running <= self.setting.max_num_seqs
        assert (plan.num_scheduled >= 1).all()
        self._media.update((start.slot, start.media) for start in plan.starts)
        if plan.media is not None:
            assert sum(each.num_tokens for each in plan.media.encode) <= self.setting.encoder_budget
            if self.setting.whole_images:
                self._check_whole(plan)

    def _check_whole(self, plan: StepPlan) -> None:
        """No row ends within an image that it begins."""
        ends = plan.num_computed + plan.num_scheduled
        for slot, start, end in zip(plan.slots.tolist(), plan.num_computed.tolist(), ends.tolist(), strict=True):
            for item in self._media[slot]:
                assert not (start <= item.offset < end < item.offset + item.num_tokens)

    def _tell(self, outcome: StepOutcome) -> None:
        offsets = np.concatenate([[0], np.cumsum(outcome.num_tokens)])
        assert offsets[-1] == len(outcome.token_ids)
        for entry, request_id in enumerate(outcome.request_ids.tolist()):
            told = self.told[request_id]
            assert not told.finishes, "told something after its end"
            told.tokens.extend(outcome.token_ids[offsets[entry] : offsets[entry + 1]].tolist())
            if entry in outcome.logprobs:
                told.logprob_positions.extend((-outcome.logprobs[entry].logprobs[:, 0]).astype(int).tolist())
            if entry in outcome.prompt_logprobs:
                rows = outcome.prompt_logprobs[entry]
                told.prompt_logprob_positions.extend((-rows.logprobs[:, 0]).astype(int).tolist())
            if entry in outcome.finished:
                request, stop = outcome.finished[entry]
                assert request.request_id == request_id
                assert request.state is RequestState.FINISHED
                told.finishes.append(stop.reason)
                told.stop_token_id, told.message = stop.token_id, stop.message
