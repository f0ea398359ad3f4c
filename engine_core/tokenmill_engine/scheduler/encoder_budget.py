"""Which images a step encodes, and how far its rows may compute without the others.

A step may compute a placeholder only if the encoder's output for its image is in the cache or is made in the same
step. Two limits: tokens that a step encodes, and tokens of all images that are looked at or begun and not ended. A
chunk ends in front of the image that exceeds one of them. Beside running streams a step encodes one image, or as many
tokens as it may compute; what encoding is expected to take counts as part of the time that a step may take. No row that
comes later takes, in the same step, what a row that had to end so is waiting for; and whoever holds an entry can go on
without another: so everybody's turn comes.
"""

from collections.abc import Collection, Sequence
from copy import copy

from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.kv_cache.encoder_cache import EncoderCache, EncoderKey
from tokenmill_engine.messages import MediaItem
from tokenmill_engine.outputs import EncoderInput, MediaPlace, PlaceholderRows, StepMedia, StepPlan, StepResult
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.budget import Allowance
from tokenmill_engine.scheduler.encoder_costs import EncoderCosts
from tokenmill_engine.scheduler.slots import IntArray, SlotTable


def encoder_key(item: MediaItem) -> EncoderKey:
    """The size is in the key of the content already; here it keeps a wrong key from harming others."""
    return EncoderKey((item.key, item.num_tokens))


def places_of(items: Sequence[MediaItem]) -> tuple[MediaPlace, ...]:
    """Where the images are, for a worker."""
    return tuple(MediaPlace(item.offset, item.num_tokens, item.grid, item.seconds_per_step) for item in items)


def items_within(items: Sequence[MediaItem], start: int, end: int) -> list[MediaItem]:
    """Images that have a placeholder among tokens `start` .. `end` - 1."""
    return [item for item in items if item.offset < end and item.offset + item.num_tokens > start]


def _begun(request: Request, num_computed: int) -> list[MediaItem]:
    """The image, if there is one, of which some placeholders are computed and some are not."""
    media = items_within(request.media, num_computed - 1, num_computed)
    return [item for item in media if item.offset + item.num_tokens > num_computed]


class EncoderBudget:
    """Limits and cache of one engine. `share` decides and changes nothing, `assign` carries it out."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.cache = EncoderCache(config.encoder_cache_tokens)
        self.costs = EncoderCosts()
        self.max_encoded = config.max_num_encoder_tokens
        self.max_tokens_if_whole = config.max_num_batched_tokens if config.disable_chunked_mm_input else None
        """Tokens of a step, if no image may be cut."""
        self.whole_prompts = config.whole_prompts

    def share(self, allowance: Allowance, leaving: Collection[Request] = ()) -> "MediaAllowance":
        """The allowance of one step for rows with and without images. What requests that are `leaving` hold counts as
        free."""
        return MediaAllowance(self, allowance, {request.request_id for request in leaving})

    def assign(self, table: SlotTable, slots: IntArray, num_computed: IntArray, after: IntArray) -> StepMedia | None:
        """Entries for all images between `num_computed` and `after` of the rows in `slots`, all [num_rows], which were
        granted by one `share`; those that are not there are to be encoded. Rows keep only what they have begun."""
        rows = (num_computed < table.media_end[slots]).nonzero()[0].tolist()
        if not rows:
            return None
        requests = [table.request(int(slots[row])) for row in rows]
        spans = [(int(num_computed[row]), int(after[row])) for row in rows]
        touched = [
            (row, request.request_id, start, end, item)
            for row, request, (start, end) in zip(rows, requests, spans, strict=True)
            for item in items_within(request.media, start, end)
        ]
        # Whatever is there is held before any place is taken from what nobody holds.
        for _, owner, _, _, item in touched:
            if self.cache.find(encoder_key(item)) is not None:
                self.cache.hold(owner, encoder_key(item))
        encode: list[EncoderInput] = []
        placeholders: list[PlaceholderRows] = []
        for row, owner, start, end, item in touched:
            key = encoder_key(item)
            if self.cache.find(key) is None:
                entry = self.cache.add(owner, key, item.num_tokens)
                encode.append(
                    EncoderInput(entry, item.kind, item.num_tokens, item.grid, item.tensors, item.key, item.shared)
                )
            else:
                entry = self.cache.hold(owner, key)
            first, last = max(start, item.offset), min(end, item.offset + item.num_tokens)
            placeholders.append(PlaceholderRows(row, first - start, last - first, entry, first - item.offset))
        for request, (_, end) in zip(requests, spans, strict=True):
            keep = [encoder_key(item) for item in _begun(request, end)]
            self.cache.release(request.request_id, keep[0] if keep else None)
        return StepMedia(self.cache.take_evicted(), encode, placeholders)

    def release(self, request: Request) -> None:
        """The request does not run any more."""
        if request.media:
            self.cache.release(request.request_id)

    def learn(self, plan: StepPlan, result: StepResult) -> None:
        """A step has ended: forget what could not be encoded, remember what encoding took."""
        if plan.media is not None:
            self.costs.observe(sum(each.num_tokens for each in plan.media.encode), result.encoder_s)
        if result.lost_entries:
            self.cache.forget(result.lost_entries)

    def check_invariants(self, table: SlotTable) -> None:
        """Raises AssertionError if entries are held by others than those who have begun an image and not ended it."""
        self.cache.check_invariants()
        begun: dict[int, EncoderKey] = {}
        for slot in table.running.tolist():
            request = table.request(slot)
            for item in _begun(request, int(table.num_computed[slot])):
                begun[request.request_id] = encoder_key(item)
        assert all(begun.get(owner) == key for owner, key in self.cache.holds())


def lost_with(plan: StepPlan) -> tuple[int, ...]:
    """Entries that may not be there, or not be freed, if the plan failed."""
    media = plan.media
    return () if media is None else (*media.free, *(each.entry for each in media.encode))


def retried_with(plan: StepPlan, result: StepResult) -> set[int]:
    """Rows that lack images because what another request had in shared memory was gone, as that request is. They can
    have them encoded again, from what they brought themselves."""
    if plan.media is None or not result.lost_entries:
        return set()
    # What an earlier step should have encoded was brought by a request that ended with that step.
    are_others = dict.fromkeys((each.entry for each in plan.media.encode), False)
    in_messages = {each.entry for each in plan.media.encode if each.shared is None}
    retried: set[int] = set()
    ended: set[int] = set()
    for place in plan.media.rows:
        if place.entry in result.lost_entries:
            (retried if are_others.get(place.entry, True) else ended).add(place.row)
            # The first row of an image that the step encodes has brought it.
            are_others[place.entry] = place.entry not in in_messages
    return retried - ended


def comparable_s(plan: StepPlan, elapsed_s: float) -> float:
    """The seconds that a step took, if they say what its tokens cost; 0 (nobody looked) for one that encoded."""
    return 0.0 if plan.media is not None and plan.media.encode else elapsed_s


class MediaAllowance:
    """What one step may still compute, encode and look at."""

    def __init__(self, budget: EncoderBudget, allowance: Allowance, leaving: set[int]) -> None:
        self._budget = budget
        self._allowance = allowance
        self._leaving = leaving
        self._num_encoded = 0
        beside_streams = allowance.num_left + allowance.num_decodes if allowance.num_decodes else budget.max_encoded
        self._max_more = min(beside_streams, budget.max_encoded)
        """Tokens that images may be together if they are several."""
        self._num_held = budget.cache.num_held_without(leaving)
        self._taken: set[EncoderKey] = set()
        """Images of rows that were granted something."""
        self._is_short = False
        """A row had to end in front of an image; later ones must not take what it waits for."""

    @property
    def num_left(self) -> int:
        """Tokens that may still be computed."""
        return self._allowance.num_left

    def grant(self, request: Request, num_pending: int, num_computed: int) -> int:
        """Tokens that a row computes of its `num_pending`, after the `num_computed` it has; 0 if it must wait."""
        if self._budget.whole_prompts and num_pending > self.num_left:
            return 0
        if num_computed >= request.media_end:
            return self._allowance.grant(num_pending, num_computed)
        reach = self._reach(request, num_computed, min(num_pending, self.num_left))
        if reach == 0:
            return 0
        if self._budget.max_tokens_if_whole is None:
            granted = self._grant(request, reach, num_computed)
        else:
            granted = self._grant_whole(request, reach, num_computed)
            self._allowance.spend(self._budget.costs.seconds(self._to_encode(request, num_computed, granted)[1]))
        for item in items_within(request.media, num_computed, num_computed + granted):
            encoded, held = self._cost(item)
            self._num_encoded += encoded
            self._num_held += held
            self._taken.add(encoder_key(item))
        return granted

    def _grant(self, request: Request, reach: int, num_computed: int) -> int:
        """As `Allowance.grant`. A row that brings images to be encoded gets less of a step whose time is limited, but
        not less than what comes before the first one."""
        begun = copy(self._allowance)
        granted = begun.grant(reach, num_computed)
        first, num_encoded = self._to_encode(request, num_computed, granted)
        if num_encoded:
            spent = copy(self._allowance)
            spent.spend(self._budget.costs.seconds(num_encoded))
            granted_beside = spent.grant(reach, num_computed)
            if granted_beside > first:
                begun, granted = spent, granted_beside
            else:
                self._is_short = True
                begun = copy(self._allowance)
                granted = begun.grant(first, num_computed)
        self._allowance = begun
        return granted

    def _to_encode(self, request: Request, num_computed: int, num_tokens: int) -> tuple[int, int]:
        """How many of the next `num_tokens` tokens come before the first image that is to be encoded, and what all
        those among them have."""
        encode = {
            encoder_key(item): item
            for item in items_within(request.media, num_computed, num_computed + num_tokens)
            if self._cost(item)[0]
        }
        first = min((item.offset - num_computed for item in encode.values()), default=num_tokens)
        return max(0, first), sum(item.num_tokens for item in encode.values())

    def _reach(self, request: Request, num_computed: int, wanted: int) -> int:
        """How many of `wanted` tokens come before the first image that cannot be had."""
        num_encoded, num_held = self._num_encoded, self._num_held
        seen: set[EncoderKey] = set()
        for item in items_within(request.media, num_computed, num_computed + wanted):
            key = encoder_key(item)
            encoded, held = (0, 0) if key in seen else self._cost(item)
            seen.add(key)
            num_encoded += encoded
            num_held += held
            most = self._budget.max_encoded if num_encoded == encoded else self._max_more
            is_too_much = num_held > self._budget.cache.capacity
            if encoded:
                is_too_much |= num_encoded > most or (num_encoded > encoded and not self._has_time(num_encoded))
            if held and (self._is_short or is_too_much):
                self._is_short = True
                return max(0, item.offset - num_computed)
        return wanted

    def _has_time(self, num_encoded: int) -> bool:
        """Whether the step may encode so many tokens in all."""
        return self._allowance.has_time(self._budget.costs.seconds(num_encoded - self._num_encoded))

    def _cost(self, item: MediaItem) -> tuple[int, int]:
        """Tokens to encode, and tokens that the cache must hold beside what it must already."""
        key, cache = encoder_key(item), self._budget.cache
        if key in self._taken or cache.is_held(key, self._leaving):
            return 0, 0
        return (item.num_tokens if cache.find(key) is None else 0), item.num_tokens

    def _grant_whole(self, request: Request, reach: int, num_computed: int) -> int:
        """As `grant`, without ending within an image that begins here."""
        asked = _end_outside(request, num_computed, reach)
        granted = self._allowance.grant(asked, num_computed) if asked else 0
        kept = _end_outside(request, num_computed, granted)
        self._allowance.num_granted -= granted - kept
        if kept or (asked and not granted):
            return kept
        # The row begins with an image for which there are not enough tokens left.
        first = items_within(request.media, num_computed, num_computed + 1)[0].num_tokens
        if self._reach(request, num_computed, first) < first:
            return 0
        return self._allowance.exceed(first, self._budget.max_tokens_if_whole or 0)


def _end_outside(request: Request, num_computed: int, num_tokens: int) -> int:
    """The most of `num_tokens` tokens that do not end within an image which begins among them."""
    for item in _begun(request, num_computed + num_tokens):
        if item.offset >= num_computed:
            return item.offset - num_computed
    return num_tokens
