"""Owns the requests of one engine core: who waits, who runs in which slot, who holds which blocks.

`schedule` decides a step and changes nothing, `apply` carries the decision out, `commit` takes the step's result in.
With asynchronous scheduling the next step is decided and applied while one is in flight, on optimistic counts: a
sampling row is assumed to yield one token. The executor runs steps strictly in the order of `apply`, so blocks freed
by a request with rows in flight can be handed out at once: whatever those rows still write is overwritten later.
Knows nothing of devices, models or sockets.
"""

import logging
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.block_hash import hash_block
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.ipc.ids import is_of
from tokenmill_engine.kv_cache.manager import KVCacheManager
from tokenmill_engine.messages import EngineLoad, FinishReason
from tokenmill_engine.outputs import BlockAppend, LogprobRows, SlotStart, StepPlan, StepResult
from tokenmill_engine.request import Request, RequestState
from tokenmill_engine.scheduler.budget import BudgetPolicy
from tokenmill_engine.scheduler.decision import Admission, Decider, Decision
from tokenmill_engine.scheduler.encoder_budget import EncoderBudget, lost_with, places_of, retried_with
from tokenmill_engine.scheduler.foresight import Foresight
from tokenmill_engine.scheduler.outcome import StepOutcome, new_prompt_logprobs, slice_logprobs
from tokenmill_engine.scheduler.prompts import LastPrompt
from tokenmill_engine.scheduler.queue import make_queue
from tokenmill_engine.scheduler.slots import IntArray, SlotTable
from tokenmill_engine.scheduler.stats import SchedulerCounters
from tokenmill_engine.scheduler.stopping import Stop, append_tokens
from tokenmill_engine.scheduler.turns import Turns

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class _StepInFlight:
    plan: StepPlan
    epochs: NDArray[np.int64]
    """[num_reqs] `SlotTable.epochs` of the plan's slots when it was made."""


class Scheduler:
    """Requests and steps of one engine core. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        budget: BudgetPolicy,
        kv: KVCacheManager,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        num_stages: int = 1,
    ) -> None:
        self._kv = kv
        self._eos_token_ids = eos_token_ids
        self._table = SlotTable(config.max_num_seqs, max_model_len, kv.block_size, hash_blocks=kv.enable_caching)
        self._waiting = make_queue(config.policy)
        turns = Turns(num_stages, self._table) if num_stages > 1 else None
        self._encoder = EncoderBudget(config)
        self._decider = Decider(config, budget, self._table, kv, self._encoder, self._waiting, turns)
        self._requests: dict[int, Request] = {}
        self._in_flight: deque[_StepInFlight] = deque()
        self._foresight = Foresight(self._table)
        self._last_prompt = LastPrompt(kv.block_size, hash_blocks=kv.enable_caching)
        self._num_steps = 0
        self.counters = SchedulerCounters()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._requests)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(self._table.num_running, len(self._waiting), self._kv.pool.usage)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens to compute that no step has been given yet, without those that running requests decode."""
        return self._waiting.num_tokens + self._table.num_waiting_tokens

    def find(self, request_id: int) -> Request | None:
        """The unfinished request with this id."""
        return self._requests.get(request_id)

    def request_ids_of(self, client: int, incarnation: int) -> list[int]:
        """Unfinished requests of one incarnation of an API server."""
        return [each for each in self._requests if is_of(each, client, incarnation)]

    def add(self, request: Request) -> None:
        """A new request waits.

        Raises:
            ValueError: one with this id is here already, or it could never fit (see `request.build_request`).
        """
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is in use")
        if request.num_prompt_tokens + request.max_tokens > self._kv.max_tokens:
            raise ValueError(f"request {request.request_id} may outgrow the pool of {self._kv.max_tokens} tokens")
        self._last_prompt.share_with(request)
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.ABORT) -> Request | None:
        """Forget a request in any state; its blocks are free at once. None if it has finished already."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, reason)
        return request

    def schedule(self) -> Decision | None:
        """Decide the next step. None: nothing to do, or nothing before the oldest step in flight is committed."""
        return self._decider.decide([step.plan for step in self._in_flight])

    def apply(self, decision: Decision) -> StepPlan:
        """Carry out a decision made on the present state; the plan must go to the executor next."""
        for request in decision.preempted:
            self._preempt(request, decision.num_blocks_needed)
        # Every cached block is taken before any block is handed out anew, or it might be handed out.
        for admission in decision.admissions:
            self._kv.start(admission.request.request_id, admission.cached)
        appends = self._grow(decision)
        now = time.monotonic()
        starts = [self._start(admission, now) for admission in decision.admissions]
        slots, num_scheduled = decision.slots, decision.num_scheduled
        if starts:
            slots = np.concatenate([slots, np.array([start.slot for start in starts], dtype=np.int32)])
            admitted = [admission.num_scheduled for admission in decision.admissions]
            num_scheduled = np.concatenate([num_scheduled, np.array(admitted, dtype=np.int32)])
        plan = self._make_plan(slots, num_scheduled, starts, appends)
        self._in_flight.append(_StepInFlight(plan, self._table.epochs[plan.slots]))
        return plan

    def foresee(self, known: Mapping[int, Sequence[int]]) -> None:
        """By row of the plan applied last: tokens that are known to follow the one that it yields."""
        if known:
            step = self._in_flight[-1]
            self._foresight.add(step.plan, step.epochs, known)

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take in the result of the oldest step in flight. Rows whose request has left are dropped."""
        return self._commit(plan, result, retried_with(plan, result))

    def _commit(self, plan: StepPlan, result: StepResult, retried: Collection[int]) -> StepOutcome:
        """`retried`: rows that have come to nothing and whose requests wait again."""
        step = self._in_flight.popleft()
        if step.plan is not plan or result.step != plan.step:
            raise ValueError(f"step {plan.step} committed with result {result.step}; due is {step.plan.step}")
        self._encoder.learn(plan, result)
        table = self._table
        rows = self._without(plan, (table.epochs[plan.slots] == step.epochs).nonzero()[0], retried)
        stops, rows = self._failed_rows(plan, result, rows)
        slots = plan.slots[rows]
        table.num_committed[slots] += plan.num_scheduled[rows]
        prompt_logprobs = new_prompt_logprobs(table, plan, result, rows)
        self._correct_optimism(slots, result.num_new[rows], plan.samples[rows])
        num_sampled, result = result.num_new[rows], self._foresight.completed(plan, result)
        token_ids, num_new = result.token_ids[rows], result.num_new[rows]
        kept_here, stops_here = append_tokens(table, slots, token_ids, num_new, self._eos_token_ids)
        self.counters.num_known_tokens += int(np.maximum(kept_here - num_sampled, 0).sum())
        stops.update((int(rows[index]), stop) for index, stop in stops_here.items())
        self._publish_full_blocks(slots)
        kept = np.zeros(plan.num_reqs, dtype=np.int32)
        kept[rows] = kept_here
        return self._make_outcome(plan, result, kept, stops, prompt_logprobs)

    def fail_step(self, plan: StepPlan, message: str) -> StepOutcome:
        """The oldest step in flight came to nothing: its requests end with an error."""
        nothing = np.full((plan.num_reqs, 1), -1, dtype=np.int32)
        errors = dict.fromkeys(range(plan.num_reqs), message)
        none = np.zeros(plan.num_reqs, dtype=np.int32)
        result = StepResult(plan.step, nothing, none, errors=errors, lost_entries=lost_with(plan))
        return self._commit(plan, result, retried=())

    def check_invariants(self) -> None:
        """Raises AssertionError if requests, slots, queue and blocks contradict each other."""
        self._kv.check_invariants()
        self._table.check_invariants()
        self._encoder.check_invariants(self._table)
        running = {self._table.request(slot).request_id for slot in self._table.running.tolist()}
        waiting = {request.request_id for request in self._waiting}
        assert len(waiting) == len(self._waiting)
        assert self._waiting.num_tokens == sum(request.num_known_tokens for request in self._waiting)
        assert not running & waiting
        assert running | waiting == set(self._requests)
        assert self._kv.request_ids() == running
        for request in self._requests.values():
            is_running = request.request_id in running
            assert (request.state is RequestState.RUNNING) == is_running == (request.slot >= 0)
            assert request.finish_reason is None
            if is_running:
                blocks = len(self._kv.block_ids(request.request_id)[0])
                assert blocks * self._kv.block_size == self._table.capacity[request.slot]

    def _preempt(self, request: Request, num_blocks_needed: int) -> None:
        """Take the request's blocks and slot; it waits again and is computed anew later."""
        num_computed = int(self._table.num_committed[request.slot])
        num_free = self._kv.pool.num_free
        self._put_back(request)
        request.num_preemptions += 1
        shortage = f"{num_blocks_needed} more blocks and {num_free} of {self._kv.pool.num_blocks} are free"
        self.counters.count_preemption(request, num_computed, shortage)

    def _put_back(self, request: Request) -> None:
        request.saved_output = self._table.outputs[request.slot, : self._table.num_outputs[request.slot]].copy()
        self._leave(request)
        request.transition(RequestState.PREEMPTED)
        self._waiting.put_back(request)

    def _without(self, plan: StepPlan, rows: NDArray[np.intp], retried: Collection[int]) -> NDArray[np.intp]:
        """`rows` but those `retried`, which are put back."""
        if not retried:
            return rows
        is_retried = np.isin(rows, list(retried))
        for row in rows[is_retried].tolist():
            self._put_back(self._table.request(int(plan.slots[row])))
        return rows[~is_retried]

    def _grow(self, decision: Decision) -> list[BlockAppend]:
        """Allocate the blocks that running rows lack."""
        appends: list[BlockAppend] = []
        table, kv = self._table, self._kv
        slots = decision.slots[decision.growing]
        ends = table.num_computed[slots] + decision.num_scheduled[decision.growing]
        starts = table.capacity[slots] // kv.block_size
        columns = (slots, table.request_ids[slots], starts, ends)
        for slot, request_id, start, end in zip(*(column.tolist() for column in columns), strict=True):
            for group, block_ids in enumerate(kv.grow(request_id, end)):
                appends.append(BlockAppend(slot, group, start, block_ids))
        table.capacity[slots] = -(-ends // kv.block_size) * kv.block_size
        return appends

    def _start(self, admission: Admission, now: float) -> SlotStart:
        """Give an admitted request its blocks and a slot."""
        request, cached = admission.request, admission.cached
        self._waiting.remove(request)
        self._kv.grow(request.request_id, admission.num_tokens)
        block_ids = self._kv.block_ids(request.request_id)
        slot = self._table.occupy(request, cached.num_tokens, len(block_ids[0]) * self._kv.block_size)
        request.transition(RequestState.RUNNING)
        if request.first_scheduled_time == 0.0:
            request.first_scheduled_time = now
            request.num_cached_tokens = cached.num_tokens
            if self._kv.enable_caching and request.may_read_cache:
                self.counters.prefix_cache_queries += admission.num_tokens
                self.counters.prefix_cache_hits += cached.num_tokens
        return SlotStart(
            slot=slot,
            request_id=request.request_id,
            token_ids=np.concatenate([request.prompt_token_ids, request.saved_output]),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=cached.num_tokens,
            block_ids=tuple(list(ids) for ids in block_ids),
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            media=places_of(request.media),
            second_text=request.second_text,
        )

    def _make_plan(
        self, slots: IntArray, num_scheduled: IntArray, starts: list[SlotStart], appends: list[BlockAppend]
    ) -> StepPlan:
        """Order the rows, decodes first, and count them as done."""
        table = self._table
        num_computed = table.num_computed[slots]
        after = num_computed + num_scheduled
        samples = after == table.num_tokens[slots]
        is_decode = samples & (num_scheduled == 1)
        num_decodes = int(np.count_nonzero(is_decode))
        if not is_decode[:num_decodes].all():
            order = np.argsort(~is_decode, kind="stable")
            slots, num_scheduled, num_computed = slots[order], num_scheduled[order], num_computed[order]
            samples, after = samples[order], after[order]
        table.num_computed[slots] = after
        table.num_tokens[slots] += samples
        self._num_steps += 1
        return StepPlan(
            step=self._num_steps,
            slots=slots,
            num_scheduled=num_scheduled,
            num_computed=num_computed,
            samples=samples,
            num_decodes=num_decodes,
            starts=starts,
            appends=appends,
            known=self._foresight.appends(slots),
            media=self._encoder.assign(table, slots, num_computed, after) if table.num_with_media else None,
        )

    def _failed_rows(
        self, plan: StepPlan, result: StepResult, rows: NDArray[np.intp]
    ) -> tuple[dict[int, Stop], NDArray[np.intp]]:
        """Rows that end with an error, and the others of `rows`."""
        errors = {row: message for row, message in result.errors.items() if row in rows}
        silent = rows[plan.samples[rows] & (result.num_new[rows] == 0)]
        for row in silent.tolist():
            errors.setdefault(row, "the model yielded no token for this request")
        stops = {row: Stop(FinishReason.ERROR, message=message) for row, message in errors.items()}
        return stops, rows[~np.isin(rows, list(errors))] if errors else rows

    def _correct_optimism(self, slots: IntArray, num_new: IntArray, samples: NDArray[np.bool_]) -> None:
        """A sampling row was counted as one token; what it yielded beyond that is computed as well."""
        surplus = num_new - samples
        if surplus.any():
            self._table.num_tokens[slots] += surplus
            self._table.num_computed[slots] += surplus
            self._table.num_committed[slots] += surplus

    def _publish_full_blocks(self, slots: IntArray) -> None:
        """Name the blocks that this step completed, so that other requests find them."""
        table, block_size = self._table, self._kv.block_size
        slots = slots[table.num_committed[slots] >= table.next_full[slots]]
        if len(slots) == 0:
            return
        num_full_blocks = table.num_committed[slots] // block_size
        table.next_full[slots] = (num_full_blocks + 1) * block_size
        for slot, num_full in zip(slots.tolist(), num_full_blocks.tolist(), strict=True):
            request = table.request(slot)
            hashes = request.block_hashes
            while len(hashes) < num_full:
                start, end = len(hashes) * block_size, (len(hashes) + 1) * block_size
                parent = hashes[-1] if hashes else request.cache_key.root()
                token_ids = table.token_ids(request, start, end).tobytes()
                hashes.append(hash_block(parent, token_ids, request.cache_key.extra(start, end)))
            self._kv.publish(request.request_id, hashes, num_full)

    def _make_outcome(
        self,
        plan: StepPlan,
        result: StepResult,
        kept: IntArray,
        stops: dict[int, Stop],
        prompt_logprobs: dict[int, LogprobRows],
    ) -> StepOutcome:
        """Collect what there is to tell and let go of the requests that ended."""
        tells = kept > 0
        if stops or prompt_logprobs:
            tells[[*stops, *prompt_logprobs]] = True
        rows = tells.nonzero()[0]
        entries = np.cumsum(tells) - 1
        columns = np.arange(result.token_ids.shape[1])
        outcome = StepOutcome(
            request_ids=self._table.request_ids[plan.slots[rows]],
            num_tokens=kept[rows],
            token_ids=result.token_ids[columns < kept[:, np.newaxis]],
            logprobs={
                int(entries[row]): slice_logprobs(piece, 0, int(kept[row]))
                for row, piece in result.logprobs.items()
                if kept[row] > 0
            },
            prompt_logprobs={int(entries[row]): piece for row, piece in prompt_logprobs.items()},
            prefilled=self._newly_prefilled(plan, rows, kept, stops),
            vectors={int(entries[row]): vector for row, vector in result.vectors.items() if tells[row]},
        )
        for row, stop in stops.items():
            request = self._table.request(int(plan.slots[row]))
            self._finish(request, stop.reason)
            outcome.finished[int(entries[row])] = (request, stop)
        return outcome

    def _newly_prefilled(
        self, plan: StepPlan, rows: NDArray[np.intp], kept: IntArray, stops: dict[int, Stop]
    ) -> dict[int, Request]:
        """Entries that sampled for the first time."""
        now = time.monotonic()
        prefilled = {}
        for entry in (self._table.num_outputs[plan.slots[rows]] == kept[rows]).nonzero()[0].tolist():
            row = int(rows[entry])
            request = self._table.request(int(plan.slots[row]))
            failed = row in stops and stops[row].reason is FinishReason.ERROR
            if plan.samples[row] and not failed and request.first_token_time == 0.0:
                request.first_token_time = now
                prefilled[entry] = request
        return prefilled

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.state is RequestState.RUNNING:
            request.saved_output = self._table.outputs[request.slot, : self._table.num_outputs[request.slot]].copy()
            self._leave(request)
        else:
            self._waiting.remove(request)
        request.transition(RequestState.FINISHED, reason)
        del self._requests[request.request_id]

    def _leave(self, request: Request) -> None:
        self._kv.release(request.request_id)
        self._encoder.release(request)
        self._table.vacate(request)
