"""The requests of one engine core whose output follows a grammar: who waits for one, how far each output has come in
its own, and what each may sample next.

A mask depends on every token before it. Where these are known when a step is handed to the executor, the masks go with
it. Where some are in flight the step is computed meanwhile as far as its logits: masks follow when the step before has
retired and its tokens are taken in, while the device is still busy with that. What a request has generated stays in its
state through a preemption, as its tokens do.

Where a grammar leaves no choice about a text, the first token of it is all that the mask allows, and `known_tokens`
tells the others, so that they are computed together (jump-forward). They are written as the tokenizer would, as models
do it. Requests to which it matters what their tokens are go one by one.

`min_tokens` and `ignore_eos` yield to the grammar: an end that it allows is put off, one that it demands is the end.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.messages import FinishReason, SamplingParams, StructuredSpec
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.request import Request, RequestState
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError, Matcher
from tokenmill_engine.structured_output.store import GrammarStore

logger = logging.getLogger(__name__)

_LEAST_KNOWN: Final = 1 / 3
"""Known tokens for each row of a step. On a GPU a step that computes several tokens of some rows takes a quarter longer
than one that computes a single token of each."""
_MOST_AT_ONCE: Final = 256
"""Known tokens of an output that are told at once; there may be as many again in the next step."""

Failure = tuple[int, GrammarError]
"""A request and what is wrong."""


@dataclass(slots=True)
class _Output:
    """What a request has generated, as its grammar sees it."""

    request_id: int
    matcher: Matcher
    param: str
    """The field that asks for the grammar."""
    put_off: NDArray[np.int64]
    """Tokens that end the request, which it does not sample while it has fewer tokens than `min_tokens` and may sample
    others."""
    put_off_always: NDArray[np.int64]
    """The same for as long as there are others."""
    min_tokens: int
    max_tokens: int
    may_jump: bool
    num_tokens: int = 0
    slot: int = -1
    forced: list[int] = field(default_factory=list)
    """Tokens that have to follow, as far as that was looked at: they stay the same, whenever they are computed."""
    num_taken: int = 0
    """Of `forced`."""

    def next_forced(self) -> list[int]:
        """Tokens that have to follow, up to where the output may end; there may be more once these are taken in.

        Raises GrammarError as `Matcher.forced`.
        """
        if self.may_jump and self.num_taken == len(self.forced):
            forced = self.matcher.forced()[: self.max_tokens - self.num_tokens]
            if forced:
                is_end = np.isin(forced, self.put_off)
                forced = forced[: int(is_end.argmax())] if is_end.any() else forced
            self.forced, self.num_taken = forced, 0
        return self.forced[self.num_taken : self.num_taken + _MOST_AT_ONCE]

    def accept(self, token_id: int) -> None:
        """The next token. Raises GrammarError as `Matcher.accept`."""
        self.matcher.accept(token_id)
        self.num_tokens += 1
        if self.num_taken < len(self.forced):
            self.num_taken += 1


class StructuredRequests:
    """Used by one thread."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """`wake` is called, in any thread, when `ready` has something new."""
        self._store = GrammarStore(config, wake)
        self._end_token_ids = config.model.eos_token_ids
        self._num_words = -(-config.model.architecture.vocab_size // 32)
        self._waiting: dict[int, tuple[Request, StructuredSpec]] = {}
        self._outputs: dict[int, _Output] = {}
        self._by_slot: dict[int, _Output] = {}
        self._late: list[tuple[int, _Output]] | None = None
        """Rows of a plan whose masks are to follow."""
        self._known: dict[int, list[int]] = {}
        self._jumps = config.structured_output.jump_forward
        self._least_known = 0.0 if config.device.kind == "cpu" else _LEAST_KNOWN
        self._num_rows = 0
        """Of the plan whose masks were made last, or are owed."""
        self._failures: list[Failure] = []

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is not ready."""
        return len(self._waiting)

    @property
    def waiting_ids(self) -> list[int]:
        """The same requests."""
        return list(self._waiting)

    def admit(self, request: Request, spec: StructuredSpec) -> bool:
        """Whether a new request may be scheduled now; else it comes out of `ready`.

        Raises GrammarError if it never may.
        """
        if not self._end_token_ids:
            reason = "this model names no token that ends a text, without which no output can be structured"
            raise GrammarError(reason, spec.param)
        grammar = self._store.find(spec.key())
        if grammar is None:
            self._waiting[request.request_id] = (request, spec)
            self._store.compile(spec.key())
            return False
        self._begin(request, spec, grammar)
        return True

    def ready(self) -> Iterator[tuple[Request, TokenmillError | None]]:
        """Requests that may be scheduled since the last call, in order of arrival, and those that never may, with the
        reason."""
        for spec, grammar in self._store.finished():
            for request, own in [each for each in self._waiting.values() if each[1].key() == spec]:
                del self._waiting[request.request_id]
                if isinstance(grammar, GrammarError):
                    yield request, GrammarError(grammar.message, own.param)
                elif isinstance(grammar, TokenmillError):
                    yield request, grammar
                else:
                    self._begin(request, own, grammar)
                    yield request, None

    def forget(self, request_id: int, reason: FinishReason) -> Request | None:
        """A request has ended. Returns it if it was waiting here; `reason` is why it has finished then."""
        output = self._outputs.pop(request_id, None)
        if output is not None and self._by_slot.get(output.slot) is output:
            del self._by_slot[output.slot]
        waiting = self._waiting.pop(request_id, None)
        if waiting is None:
            return None
        request, spec = waiting
        if all(other.text != spec.text for _, other in self._waiting.values()):
            self._store.give_up(spec.key())
        request.transition(RequestState.FINISHED, reason)
        return request

    def masked(self, plan: StepPlan, *, tokens_in_flight: bool) -> StepPlan:
        """`plan`, with what its rows may sample. If `tokens_in_flight` come before it, `late_masks` gives that instead
        once they are taken in, as the plan says then."""
        if not self._outputs:
            return plan
        for start in plan.starts:
            output = self._outputs.get(start.request_id)
            self._by_slot.pop(start.slot, None)
            if output is not None:
                output.slot = start.slot
                self._by_slot[start.slot] = output
        sampling = plan.samples.nonzero()[0].tolist()
        slots = plan.slots[sampling].tolist()
        rows = [(row, self._by_slot[slot]) for row, slot in zip(sampling, slots, strict=True) if slot in self._by_slot]
        if not rows:
            return plan
        self._num_rows = plan.num_reqs
        if tokens_in_flight:
            self._late = rows
            return replace(plan, masks_follow=True)
        return replace(plan, masks=self._masks(rows))

    @property
    def owes_masks(self) -> bool:
        """Whether a plan waits for `late_masks`."""
        return self._late is not None

    def late_masks(self) -> TokenMasks | None:
        """What the rows of that plan may sample, without those of requests that have ended since."""
        rows, self._late = self._late or [], None
        return self._masks([(row, output) for row, output in rows if self._outputs.get(output.request_id) is output])

    def known_tokens(self) -> dict[int, list[int]]:
        """By row of the plan whose masks were made last: tokens that have to follow the one that it samples. They are
        told once, and only if they are enough of them."""
        known, self._known = self._known, {}
        is_worth_it = sum(map(len, known.values())) >= self._least_known * self._num_rows
        return known if is_worth_it else {}

    def take(self, request_ids: NDArray[np.int64], num_tokens: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
        """New tokens of a step: `num_tokens[i]` of request `request_ids[i]`, one after the other in `token_ids`."""
        if not self._outputs:
            return
        start = 0
        for request_id, count in zip(request_ids.tolist(), num_tokens.tolist(), strict=True):
            output = self._outputs.get(request_id)
            if output is not None:
                self._accept(output, token_ids[start : start + count].tolist())
            start += count

    def failures(self) -> list[Failure]:
        """Requests that cannot go on, since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def close(self) -> None:
        """End what runs beside."""
        self._store.close()

    def _begin(self, request: Request, spec: StructuredSpec, grammar: Grammar) -> None:
        sampling = request.sampling
        ends = np.array(self._end_token_ids, np.int64)
        self._outputs[request.request_id] = _Output(
            request_id=request.request_id,
            matcher=grammar.matcher(),
            param=spec.param,
            put_off=np.union1d(ends, np.array(request.stop_token_ids, np.int64)),
            put_off_always=ends if sampling.ignore_eos else np.empty(0, np.int64),
            min_tokens=sampling.min_tokens,
            max_tokens=request.max_tokens,
            may_jump=self._jumps and not _looks_at_tokens(sampling),
        )
        request.sampling = msgspec.structs.replace(sampling, min_tokens=0, ignore_eos=False)
        request.stop_token_ids = tuple(dict.fromkeys((*self._end_token_ids, *request.stop_token_ids)))

    def _masks(self, rows: Sequence[tuple[int, _Output]]) -> TokenMasks | None:
        """Of rows of a plan."""
        if not rows:
            return None
        bits = np.zeros((len(rows), self._num_words), dtype=np.int32)
        for index, (row, output) in enumerate(rows):
            forced = self._fill(bits, index, output)
            if len(forced) > 1:
                self._known[row] = forced[1:]
        return TokenMasks(np.array([row for row, _ in rows], dtype=np.int32), bits)

    def _fill(self, bits: NDArray[np.int32], row: int, output: _Output) -> list[int]:
        """Returns what has to follow: its first token is all that is allowed then."""
        try:
            forced = output.next_forced()
            if forced:
                bits[row, forced[0] // 32] = _bits_of(np.array(forced[:1]))[0]
                return forced
            output.matcher.fill(bits, row)
        except GrammarError as error:
            self._fail(output, error)
            bits[row] = -1
            return []
        put_off = output.put_off if output.num_tokens < output.min_tokens else output.put_off_always
        if len(put_off):
            others = bits[row].copy()
            np.bitwise_and.at(others, put_off // 32, ~_bits_of(put_off))
            if others.any():
                bits[row] = others
        return []

    def _accept(self, output: _Output, token_ids: list[int]) -> None:
        for token_id in token_ids:
            try:
                output.accept(token_id)
            except GrammarError as error:
                self._fail(output, error)
                return

    def _fail(self, output: _Output, error: GrammarError) -> None:
        """Once, whatever it still samples. What libraries say quotes the client's grammar: it is told, not logged."""
        logger.warning("request %d ends: its grammar cannot be followed any further", output.request_id)
        self.forget(output.request_id, FinishReason.ERROR)
        message = f"the grammar cannot be followed any further: {error}"
        self._failures.append((output.request_id, GrammarError(message, output.param)))


def _looks_at_tokens(sampling: SamplingParams) -> bool:
    """Whether it matters to a request by which tokens its text is written."""
    excludes = sampling.allowed_token_ids is not None or sampling.bad_words_token_ids or sampling.logit_bias
    return bool(excludes) or sampling.logprobs is not None


def _bits_of(token_ids: NDArray[np.int64]) -> NDArray[np.int32]:
    """int32 [n]: the bit of each in its word."""
    return (np.uint32(1) << (token_ids % 32).astype(np.uint32)).view(np.int32)
