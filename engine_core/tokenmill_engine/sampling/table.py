"""Sampling parameters of every slot: numbers in persistent device tables, features as host bits.

The host bits say which parts of the sampler a batch needs at all; the numbers never leave the device.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import SlotStart
from tokenmill_engine.sampling.edits import LogitEdits
from tokenmill_engine.sampling.random import as_int64
from tokenmill_engine.sampling.transfer import to_device
from tokenmill_kernels import sampling_columns as columns

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this pick the most likely token."""

# Bits of `SamplingTable.features`.
RANDOM: Final = 1
FILTER: Final = 2
"""top_k, top_p or min_p is in force."""
SMALL_TOP_K: Final = 4
"""top_k is in force and at most `MAX_SMALL_TOP_K`."""
PENALTY: Final = 8
EDIT: Final = 16
"""A logit bias, forbidden or allowed tokens."""
LOGPROBS: Final = 32

MASK: Final = 64
"""Grammars allow some tokens only. No slot has it: the host says it of a step, with `Sampler.load_masks`."""

ON_DEVICE: Final = RANDOM | FILTER | SMALL_TOP_K | PENALTY | MASK
"""What `Sampler.sample_on_device` does."""

MAX_SMALL_TOP_K: Final = 64


def features_of(params: SamplingParams, edits: LogitEdits | None) -> int:
    """The feature bits that `params` switch on."""
    bits = 0
    if params.temperature >= GREEDY_BELOW:
        bits |= RANDOM
        if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
            bits |= FILTER
        if 0 < params.top_k <= MAX_SMALL_TOP_K:
            bits |= SMALL_TOP_K
    if params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        bits |= PENALTY
    if edits is not None:
        bits |= EDIT
    if params.logprobs is not None:
        bits |= LOGPROBS
    return bits


class SamplingTable:
    """One row per slot. On the CPU the device tables share memory with their host copies."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        storage: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`storage`: `floats` and `integers`, for which the owner of the memory sends the rows of slots that start."""
        self.vocab_size = vocab_size
        self.device = device
        self.version = 0
        """Changes whenever a slot does."""
        self.features: NDArray[np.uint8] = np.zeros(num_slots, np.uint8)
        self.num_logprobs: NDArray[np.int32] = np.full(num_slots, -1, np.int32)
        self.num_prompt_logprobs: NDArray[np.int32] = np.full(num_slots, -1, np.int32)
        self.edits: dict[int, LogitEdits] = {}
        self.wanted: dict[int, tuple[int, ...]] = {}
        """Tokens to report log-probabilities of, if they are not to be the most likely ones."""
        self._host_floats = np.zeros((num_slots, columns.NUM_FLOATS), np.float32)
        self._host_integers = np.zeros((num_slots, columns.NUM_INTEGERS), np.int64)
        self._sends = storage is None and device.type != "cpu"
        if storage is None:
            storage = torch.from_numpy(self._host_floats).to(device), torch.from_numpy(self._host_integers).to(device)
        self.floats, self.integers = storage
        """float32 [num_slots, NUM_FLOATS] and int64 [num_slots, NUM_INTEGERS]: columns as in
        `tokenmill_kernels.sampling_columns`."""

    def start(self, starts: Sequence[SlotStart]) -> None:
        """Write the parameters of requests that take a slot."""
        if not starts:
            return
        self.version += 1
        for start in starts:
            self._write_host(start)
        if self._sends:
            # The last start of a slot wins; duplicate rows carry equal values.
            slots = np.array([start.slot for start in starts], np.int64)
            rows = to_device(slots, self.device)
            self.floats.index_copy_(0, rows, to_device(self._host_floats[slots], self.device))
            self.integers.index_copy_(0, rows, to_device(self._host_integers[slots], self.device))

    def host_row(self, slot: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """What belongs in the slot's rows of `floats` and `integers`."""
        return self._host_floats[slot], self._host_integers[slot]

    def _write_host(self, start: SlotStart) -> None:
        slot, params = start.slot, start.sampling
        edits = LogitEdits.of(params, start.stop_token_ids)
        self.features[slot] = features_of(params, edits)
        self.num_logprobs[slot] = -1 if params.logprobs is None else len(params.logprob_token_ids) or params.logprobs
        if params.logprobs is not None and params.logprob_token_ids:
            self.wanted[slot] = params.logprob_token_ids
        else:
            self.wanted.pop(slot, None)
        self.num_prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        if edits is None:
            self.edits.pop(slot, None)
        else:
            self.edits[slot] = edits
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else self.vocab_size
        self._host_integers[slot] = (top_k, as_int64(params.seed or 0))
        self._host_floats[slot] = (
            params.temperature if self.features[slot] & RANDOM else 0.0,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
        )
