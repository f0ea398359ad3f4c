"""The running requests as columns: one row per slot, so that a step of many decodes is a few array operations.

Two views of progress. The committed one counts what retired steps have done. The optimistic one, which decides the
next step, counts the steps in flight as done and assumes that each of their sampling rows yields one token.
"""

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.request import Request

IntArray = NDArray[np.int32]
_NEVER = np.iinfo(np.int32).max


class SlotTable:
    """`num_slots` rows; all columns are indexed by slot.

    A slot's `epochs` entry changes whenever its request leaves: a step in flight whose rows carry an older epoch
    belongs to a request that is gone.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, hash_blocks: bool) -> None:
        self.num_slots = num_slots
        self._block_size = block_size
        self._hash_blocks = hash_blocks
        self.requests: NDArray[np.object_] = np.full(num_slots, None, dtype=np.object_)
        self.request_ids = np.zeros(num_slots, dtype=np.int64)
        self.epochs = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = self._column()
        """Optimistic: prompt and generated tokens, one in flight included."""
        self.num_computed = self._column()
        """Optimistic: tokens whose keys and values are written once the steps in flight retire."""
        self.max_total = self._column()
        """`num_tokens` at which nothing is left to schedule."""
        self.capacity = self._column()
        """Tokens that fit into the blocks held."""
        self.num_committed = self._column()
        self.num_prompt = self._column()
        self.media_end = self._column()
        """Tokens up to the end of the last image; 0 without media."""
        self.next_full = self._column()
        """`num_committed` at which one more block is full and can be named."""
        self.num_outputs = self._column()
        """Committed: tokens in this slot's row of `outputs`."""
        self.max_outputs = self._column()
        self.stops_at_eos = np.zeros(num_slots, dtype=np.bool_)
        self.has_stop_ids = np.zeros(num_slots, dtype=np.bool_)
        # Pages of a row are touched, and so backed by memory, only as tokens arrive.
        self.outputs = np.empty((num_slots, max_model_len), dtype=np.int32)
        self.num_with_media = 0
        """Running requests that have images."""
        self._order = self._column()
        self._num_running = 0
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def running(self) -> IntArray:
        """Occupied slots in order of admission (a copy: plans in flight keep it)."""
        return self._order[: self._num_running].copy()

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of running requests that are in no step yet, beyond the one that each is about to sample from."""
        # Free slots have nothing left to compute, and need not be left out.
        return int(np.add.reduce(self.num_tokens - self.num_computed)) - self._num_running

    def request(self, slot: int) -> Request:
        """The request in an occupied slot."""
        request = self.requests[slot]
        assert isinstance(request, Request)
        return request

    def occupy(self, request: Request, num_computed: int, capacity: int) -> int:
        """Give `request` a free slot, with `num_computed` tokens done. Returns the slot."""
        slot = self._free.pop()
        saved = request.saved_output
        num_prompt = request.num_prompt_tokens
        self.requests[slot] = request
        self.request_ids[slot] = request.request_id
        self.num_prompt[slot] = num_prompt
        self.media_end[slot] = request.media_end
        self.num_with_media += bool(request.media)
        self.num_tokens[slot] = num_prompt + len(saved)
        self.num_computed[slot] = self.num_committed[slot] = num_computed
        # A request that only scores its prompt still ends in one sampling row, whose token is dropped.
        self.max_total[slot] = num_prompt + max(1, request.max_tokens)
        self.capacity[slot] = capacity
        self.next_full[slot] = (
            (num_computed // self._block_size + 1) * self._block_size if self._hash_blocks else _NEVER
        )
        self.outputs[slot, : len(saved)] = saved
        self.num_outputs[slot] = len(saved)
        self.max_outputs[slot] = request.max_tokens
        self.stops_at_eos[slot] = not request.sampling.ignore_eos
        self.has_stop_ids[slot] = bool(request.own_stop_ids)
        self._order[self._num_running] = slot
        self._num_running += 1
        request.slot = slot
        return slot

    def vacate(self, request: Request) -> None:
        """Take the slot back. Rows of steps in flight stop counting."""
        slot = request.slot
        running = self.running
        left = running[running != slot]
        self._num_running = len(left)
        self._order[: self._num_running] = left
        self.requests[slot] = None
        self.num_with_media -= bool(request.media)
        self.media_end[slot] = 0
        self.num_tokens[slot] = self.num_computed[slot] = 0
        self.epochs[slot] += 1
        self._free.append(slot)
        request.slot = -1

    def token_ids(self, request: Request, start: int, end: int) -> IntArray:
        """Committed tokens `start` .. `end` - 1 of a running request, prompt first."""
        outputs: IntArray = self.outputs[request.slot]
        num_prompt = request.num_prompt_tokens
        if start >= num_prompt:
            return outputs[start - num_prompt : end - num_prompt]
        if end <= num_prompt:
            return request.prompt_token_ids[start:end]
        return np.concatenate([request.prompt_token_ids[start:], outputs[: end - num_prompt]])

    def check_invariants(self) -> None:
        """Raises AssertionError if slots, order and requests contradict each other."""
        running = self.running.tolist()
        assert sorted([*running, *self._free]) == list(range(self.num_slots))
        for slot in running:
            request = self.request(slot)
            assert request.slot == slot
            assert request.request_id == self.request_ids[slot]
            assert self.num_committed[slot] <= self.num_computed[slot] <= self.capacity[slot]
            assert self.num_computed[slot] < self.num_tokens[slot] <= self.max_total[slot]
            assert self.num_outputs[slot] <= self.max_outputs[slot]
            known = request.num_prompt_tokens + self.num_outputs[slot]
            assert self.num_committed[slot] < known <= self.num_tokens[slot]
            assert self.media_end[slot] == request.media_end <= request.num_prompt_tokens
        assert all(self.requests[slot] is None for slot in self._free)
        assert self.num_with_media == sum(bool(self.request(slot).media) for slot in running)
        assert not self.media_end[self._free].any()
        assert not self.num_tokens[self._free].any()
        assert not self.num_computed[self._free].any()

    def _column(self) -> IntArray:
        return np.zeros(self.num_slots, dtype=np.int32)
