"""What one step should do. Deciding reads the scheduler's state and changes nothing.

There is no prefill phase and no decode phase: every request has tokens it should have computed and tokens it has,
and a step hands out its budget (`scheduler.budget` says how much) to let them catch up. Running requests come first,
those that need a single token, or know a few more (`scheduler.foresight`), before those that need many; what is left
over admits waiting ones. Whatever does not fit is cut and goes on later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.kv_cache.manager import CachedPrefix, KVCacheManager
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.budget import BudgetPolicy
from tokenmill_engine.scheduler.encoder_budget import EncoderBudget, MediaAllowance
from tokenmill_engine.scheduler.queue import WaitingQueue
from tokenmill_engine.scheduler.slots import IntArray, SlotTable
from tokenmill_engine.scheduler.turns import Turns

_MOST_KNOWN: Final = 64
"""Tokens that a stream computes in a step beside others. One that knows more of its text computes it as prompts are."""


@dataclass(slots=True, frozen=True)
class Admission:
    """A waiting request takes a slot and blocks for all of its tokens, and computes `num_scheduled` of them now."""

    request: Request
    cached: CachedPrefix
    num_tokens: int
    num_scheduled: int


@dataclass(slots=True, frozen=True)
class Decision:
    """Preempt, then admit, then compute."""

    slots: IntArray
    """[num_rows] running requests to compute."""
    num_scheduled: IntArray
    """[num_rows] tokens of each, at least 1."""
    growing: IntArray
    """Indices of the rows that need more blocks first."""
    admissions: list[Admission] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    num_blocks_needed: int = 0
    """Blocks that the running requests needed before any was preempted."""


class Decider:
    """Decides steps from the state it was given."""

    def __init__(
        self,
        config: SchedulerConfig,
        budget: BudgetPolicy,
        table: SlotTable,
        kv: KVCacheManager,
        encoder: EncoderBudget,
        waiting: WaitingQueue,
        turns: Turns | None = None,
    ) -> None:
        """`turns`: None if a request may be computed again while its last token is in flight."""
        self._by_priority = config.policy == "priority"
        self._budget = budget
        self._table = table
        self._kv = kv
        self._encoder = encoder
        self._waiting = waiting
        self._turns = turns

    def decide(self, in_flight: Sequence[StepPlan]) -> Decision | None:
        """The next step, or None if there is nothing to do before a step in flight retires (or at all).

        Preempting waits for the steps in flight: they may free the blocks, and nothing they yield is lost. With turns
        it waits for the step that the victim is in alone: there are always others, and draining idles every stage.
        """
        running = self._table.running
        preempted: list[Request] = []
        first_needed = 0
        while True:
            slots, num_scheduled, allowance = self._share_budget(running, in_flight, preempted)
            growing, needed = self._growth(slots, num_scheduled)
            free = self._kv.pool.num_free + self._kv.count_freed(r.request_id for r in preempted)
            if needed <= free:
                break
            victim = self._choose_victim(running)
            if in_flight and (self._turns is None or self._turns.is_in_flight(victim.slot)):
                return None
            first_needed = first_needed or needed
            preempted.append(victim)
            running = running[running != victim.slot]
        if preempted and len(slots):
            return Decision(slots, num_scheduled, growing, preempted=preempted, num_blocks_needed=first_needed)
        # Nothing is left to compute without the victims: they keep their places until a step in flight retires.
        admissions = self._admit(allowance, free - needed) if self._waiting and not preempted else []
        if len(slots) == 0 and not admissions:
            return None
        return Decision(slots, num_scheduled, growing, admissions)

    def _share_budget(
        self, running: IntArray, in_flight: Sequence[StepPlan], preempted: Sequence[Request]
    ) -> tuple[IntArray, IntArray, MediaAllowance]:
        """Rows to compute, tokens of each, and what is left: streams first, which need one token or know a few, then
        prompts in order of admission."""
        table = self._table
        num_tokens = table.num_tokens[running]
        unfinished = num_tokens < table.max_total[running]
        if not unfinished.all():
            running, num_tokens = running[unfinished], num_tokens[unfinished]
        num_elsewhere = 0
        if self._turns is not None:
            num_unfinished, running = len(running), self._turns.ready(running)
            num_elsewhere, num_tokens = num_unfinished - len(running), table.num_tokens[running]
        num_computed = table.num_computed[running]
        pending = num_tokens - num_computed
        is_stream = pending == 1
        if table.num_with_media:
            # A placeholder may have to wait for its image, even the last token of a prompt.
            is_stream &= num_computed >= table.media_end[running]
        streams, counts, contexts, num_long = running, pending, num_tokens, 0
        if not is_stream.all():
            generates = num_computed >= table.num_prompt[running]
            is_stream |= generates & (pending <= _MOST_KNOWN)
            num_long = int(np.count_nonzero(generates & ~is_stream))
            # One that has much to compute keeps nobody waiting who has little.
            order = is_stream.nonzero()[0][np.argsort(pending[is_stream], kind="stable")]
            streams, counts, contexts = running[order], pending[order], num_tokens[order]
        num_streams = len(streams)
        if self._turns is not None:
            share = self._turns.share(num_streams, num_elsewhere, in_flight)
            streams, counts, contexts = streams[:share], counts[:share], contexts[:share]
        tokens = self._budget.for_step(int(counts.sum()), int(contexts.sum()), num_elsewhere + num_long)
        streams, counts = _within(tokens.num_decodes, streams, counts)
        allowance = self._encoder.share(tokens, preempted)
        if num_streams == len(running):
            return streams, counts, allowance
        many = running[~is_stream]
        rows = zip(many.tolist(), pending[~is_stream].tolist(), num_computed[~is_stream].tolist(), strict=True)
        chunks = np.array([allowance.grant(table.request(slot), *row) for slot, *row in rows], dtype=np.int32)
        slots = np.concatenate([streams, many[chunks > 0]])
        return slots, np.concatenate([counts, chunks[chunks > 0]]), allowance

    def _growth(self, slots: IntArray, num_scheduled: IntArray) -> tuple[IntArray, int]:
        """Rows whose tokens exceed their blocks, and how many blocks they lack together."""
        lacking = self._table.num_computed[slots] + num_scheduled - self._table.capacity[slots]
        growing = (lacking > 0).nonzero()[0].astype(np.int32)
        if len(growing) == 0:
            return growing, 0
        num_blocks = -(-lacking[growing] // self._kv.block_size)
        return growing, int(num_blocks.sum()) * self._kv.num_groups

    def _choose_victim(self, running: IntArray) -> Request:
        """Who gives its blocks back: the least urgent, then who was preempted least, then who came last."""
        requests = [self._table.request(slot) for slot in running.tolist()]
        if self._by_priority:
            return max(requests, key=lambda r: (r.priority, -r.num_preemptions, r.arrival_time))
        return min(reversed(requests), key=lambda r: r.num_preemptions)

    def _admit(self, allowance: MediaAllowance, free: int) -> list[Admission]:
        """Waiting requests that start now, in their order, up to the first that does not fit.

        A request fits if blocks for all of its tokens are free and one more remains for every other request that
        runs: else the newcomer and the old ones would soon take turns in preempting each other.
        """
        admissions: list[Admission] = []
        reserved = self._table.num_running * self._kv.num_groups
        free_slots = self._table.num_slots - self._table.num_running
        taken: set[int] = set()
        for request in self._waiting:
            if allowance.num_left == 0 or len(admissions) == free_slots:
                break
            num_tokens = request.num_known_tokens
            # The last token is always computed: its logits are what comes next.
            readable = request.block_hashes if request.may_read_cache else ()
            cached = self._kv.find_cached(readable, num_tokens - 1)
            unused = {b for b in cached.all_ids() if self._kv.pool.references(b) == 0} - taken
            needed = self._kv.num_blocks(num_tokens) - self._kv.num_blocks(cached.num_tokens) + len(unused)
            if needed + reserved > free:
                break
            num_scheduled = allowance.grant(request, num_tokens - cached.num_tokens, cached.num_tokens)
            if num_scheduled == 0:
                break
            admissions.append(Admission(request, cached, num_tokens, num_scheduled))
            taken |= unused
            free -= needed
            reserved += self._kv.num_groups
        return admissions


def _within(num_tokens: int, slots: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """The first of `slots` that have so many tokens together, and how many each of them computes of its `counts`."""
    if counts.sum() <= num_tokens:
        return slots, counts
    counts = np.clip(num_tokens - (np.cumsum(counts) - counts), 0, counts).astype(np.int32)
    return slots[counts > 0], counts[counts > 0]
