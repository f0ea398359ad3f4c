"""An executor whose model is a hash: the next token depends on every earlier token, read through the block tables.

Each computed position writes a digest of the whole prefix into its block, built on the digest it *reads* from the
position before. The next token mixes all digests of the request. A wrong block, a stale block, a skipped or repeated
position or a wrong token changes every token that follows, so equal output means equal bookkeeping.
A placeholder counts as the row of the image that stands in for it.
"""

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenmill_engine.errors import EngineError
from tokenmill_engine.messages import MediaItem, MediaTensor, SamplingParams
from tokenmill_engine.outputs import LogprobRows, MediaPlace, StepPlan, StepResult

VOCAB_SIZE = 60
EOS = 7
_MASK = (1 << 64) - 1


def _digest(before: int, token: int) -> int:
    mixed = (before ^ (token + 1) * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & _MASK
    return mixed ^ mixed >> 29


def _next_token(digests: list[int]) -> int:
    total = sum(digest * (2 * position + 1) for position, digest in enumerate(digests)) & _MASK
    return (total ^ total >> 31) % VOCAB_SIZE


def _encode(tensors: Mapping[str, MediaTensor], count: int) -> list[int]:
    """What stands for the placeholders of an image, as large as a digest."""
    first = int.from_bytes(hashlib.sha256(tensors["pixel_values"].data).digest()[:8], "little")
    return [first + row & _MASK for row in range(count)]


def solo_run(
    prompt: list[int],
    sampling: SamplingParams,
    max_model_len: int,
    media: Sequence[MediaItem] = (),
    known: Mapping[int, Sequence[int]] = {},  # nobody changes it
) -> tuple[list[int], str]:
    """What the model answers without any scheduler: tokens and finish reason. Behind the output's token of an index in
    `known` come those, which it does not choose."""
    seen = list(prompt)
    for item in media:
        seen[item.offset : item.offset + item.num_tokens] = _encode(item.tensors, item.num_tokens)
    digests: list[int] = []
    for token in seen:
        digests.append(_digest(digests[-1] if digests else 0, token))
    room = max_model_len - len(prompt)
    limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
    output: list[int] = []
    foreseen: deque[int] = deque()
    while len(output) < limit:
        if foreseen:
            token = foreseen.popleft()
        else:
            token = _next_token(digests)
            foreseen.extend(known.get(len(output), ()))
        output.append(token)
        digests.append(_digest(digests[-1], token))
        may_stop = len(output) >= sampling.min_tokens
        if may_stop and ((token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids):
            return output, "stop"
    return output, "length"


@dataclass
class _Slot:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    tables: list[list[int]]
    sampling: SamplingParams
    media: tuple[MediaPlace, ...]
    seen: dict[int, int] = field(default_factory=dict)
    """By position, what stands for a placeholder."""


@dataclass
class FakeHandle:
    """Runs its step, and those before it, when asked for the result."""

    executor: "FakeExecutor"
    plan: StepPlan

    def result(self) -> StepResult:
        return self.executor.run_until(self.plan)


@dataclass
class FakeExecutor:
    """Honours `StepPlan`. `failing_steps` raise EngineError; `poisoned` request ids fail alone when they sample;
    `unreadable` pixels cannot be encoded; shared objects with a stamp in `gone` are not there any more."""

    num_blocks: int
    block_size: int
    num_groups: int = 1
    failing_steps: set[int] = field(default_factory=set)
    poisoned: set[int] = field(default_factory=set)
    unreadable: set[bytes] = field(default_factory=set)
    gone: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._digests = np.zeros((self.num_blocks, self.block_size), dtype=np.uint64)
        self._slots: dict[int, _Slot] = {}
        self._request_ids: dict[int, int] = {}
        self._queue: deque[StepPlan] = deque()
        self._results: dict[int, StepResult] = {}
        self._encoded: dict[int, list[int]] = {}
        self.encoded: list[int] = []
        """Entries in order, of all steps."""
        self.most_kept = 0
        """Tokens of all images at once."""
        self.num_steps = 0
        self.num_tokens = 0
        self.queue_lengths: list[int] = []
        """Steps submitted and not yet run, each time somebody waited for one."""

    def submit(self, plan: StepPlan) -> FakeHandle:
        self._queue.append(plan)
        return FakeHandle(self, plan)

    def shutdown(self) -> None:
        self._queue.clear()

    def run_until(self, plan: StepPlan) -> StepResult:
        self.queue_lengths.append(len(self._queue))
        while plan.step not in self._results:
            step = self._queue.popleft()
            self._results[step.step] = self._run(step)
        if plan.step in self.failing_steps:
            raise EngineError("the fake device failed")
        return self._results.pop(plan.step)

    def _run(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self._apply_changes(plan)
        assert len(set(plan.slots.tolist())) == plan.num_reqs
        token_ids = np.full((plan.num_reqs, 1), -1, dtype=np.int32)
        num_new = np.zeros(plan.num_reqs, dtype=np.int32)
        errors, lost = self._look(plan)
        result = StepResult(plan.step, token_ids, num_new, errors=errors, lost_entries=lost)
        for row in range(plan.num_reqs):
            slot = self._slots[int(plan.slots[row])]
            scheduled, samples = int(plan.num_scheduled[row]), bool(plan.samples[row])
            assert slot.num_computed == plan.num_computed[row]
            assert samples == (slot.num_computed + scheduled == len(slot.tokens))
            assert row >= plan.num_decodes or (scheduled == 1 and samples)
            start = slot.num_computed
            self._compute(slot, scheduled, is_blind=row in errors)
            if slot.sampling.prompt_logprobs is not None:
                _add_prompt_logprobs(result, row, slot, start)
            if not samples:
                continue
            if self._request_ids[int(plan.slots[row])] in self.poisoned:
                result.errors[row] = "poisoned"
            token = _next_token(self._read(slot, slot.num_computed))
            slot.tokens.append(token)
            assert len(slot.tokens) <= slot.num_prompt + max(1, slot.sampling.max_tokens or 0)
            token_ids[row, 0] = token
            num_new[row] = 1
            if slot.sampling.logprobs is not None:
                result.logprobs[row] = _logprob_rows([token], [len(slot.tokens) - 1], slot.sampling.logprobs)
        return result

    def _apply_changes(self, plan: StepPlan) -> None:
        for start in plan.starts:
            assert len(start.block_ids) == self.num_groups
            assert start.sampling.seed is not None
            assert start.sampling.max_tokens is not None
            self._slots[start.slot] = _Slot(
                tokens=start.token_ids.tolist(),
                num_prompt=start.num_prompt_tokens,
                num_computed=start.num_computed_tokens,
                tables=[list(ids) for ids in start.block_ids],
                sampling=start.sampling,
                media=start.media,
            )
            self._request_ids[start.slot] = start.request_id
        for append in plan.appends:
            table = self._slots[append.slot].tables[append.group]
            assert len(table) == append.start
            table.extend(append.block_ids)
        for known in plan.known:
            assert known.slot in set(plan.slots.tolist()) - {start.slot for start in plan.starts}
            assert len(self._slots[known.slot].tokens) == known.start
            self._slots[known.slot].tokens.extend(known.token_ids)

    def _look(self, plan: StepPlan) -> tuple[dict[int, str], tuple[int, ...]]:
        """Free, encode, and give rows what stands for their placeholders. Returns the rows that lack something, and
        the entries that were not there."""
        if plan.media is None:
            return {}, ()
        errors: dict[int, str] = {}
        lost: dict[int, None] = {}
        for entry in plan.media.free:
            self._encoded.pop(entry, None)
        for each in plan.media.encode:
            assert not self.encoded or each.entry > self.encoded[-1]
            self.encoded.append(each.entry)
            is_there = each.shared is None or each.shared.stamp not in self.gone
            if is_there and each.tensors["pixel_values"].data not in self.unreadable:
                self._encoded[each.entry] = _encode(each.tensors, each.num_tokens)
        self.most_kept = max(self.most_kept, sum(map(len, self._encoded.values())))
        for rows in plan.media.rows:
            if rows.entry not in self._encoded:
                errors[rows.row] = "the image is not there"
                lost[rows.entry] = None
                continue
            slot = self._slots[int(plan.slots[rows.row])]
            values = self._encoded[rows.entry][rows.first : rows.first + rows.count]
            assert len(values) == rows.count <= plan.num_scheduled[rows.row] - rows.start
            slot.seen.update(enumerate(values, slot.num_computed + rows.start))
        return errors, tuple(lost)

    def _compute(self, slot: _Slot, count: int, is_blind: bool = False) -> None:
        for position in range(slot.num_computed, slot.num_computed + count):
            is_placeholder = any(place.offset <= position < place.offset + place.num_tokens for place in slot.media)
            assert is_blind or is_placeholder == (position in slot.seen)
            for table in slot.tables:
                before = self._entry(table, position - 1) if position else 0
                block = table[position // self.block_size]
                seen = slot.seen.get(position, slot.tokens[position])
                self._digests[block, position % self.block_size] = _digest(before, seen)
        slot.num_computed += count

    def _read(self, slot: _Slot, length: int) -> list[int]:
        readings = [[self._entry(table, position) for position in range(length)] for table in slot.tables]
        assert all(reading == readings[0] for reading in readings)
        return readings[0]

    def _entry(self, table: list[int], position: int) -> int:
        return int(self._digests[table[position // self.block_size], position % self.block_size])


def _add_prompt_logprobs(result: StepResult, row: int, slot: _Slot, start: int) -> None:
    positions = list(range(start + 1, min(slot.num_computed + 1, slot.num_prompt)))
    if positions:
        tokens = [slot.tokens[position] for position in positions]
        result.prompt_logprobs[row] = _logprob_rows(tokens, positions, slot.sampling.prompt_logprobs or 0)


def _logprob_rows(tokens: list[int], positions: list[int], num_top: int) -> LogprobRows:
    """Minus the position stands for the log-probability, so that a test sees which position it got."""
    token_ids = np.repeat(np.array(tokens, dtype=np.int32)[:, None], 1 + num_top, axis=1)
    logprobs = np.repeat(-np.array(positions, dtype=np.float32)[:, None], 1 + num_top, axis=1)
    return LogprobRows(token_ids, logprobs, np.ones(len(tokens), dtype=np.int32))
