"""Changes of single logits: allowed tokens, logit bias, end tokens before `min_tokens`, forbidden words.

Every change but the allow-list is an addition (of a bias, or of minus infinity), so that one scatter applies them
all and two that meet in one logit need no order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling.tokens import TokenTable
from tokenmill_engine.sampling.transfer import flat_array, to_device

_MINUS_INFINITY = float("-inf")


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """What one request wants changed. Token ids are int64 and in the vocabulary."""

    allowed: NDArray[np.int64] | None
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    end_ids: NDArray[np.int64]
    """Forbidden until `min_tokens` tokens are out."""
    min_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    """The last token of each is forbidden where the output ends in the others."""

    @classmethod
    def of(cls, params: SamplingParams, stop_token_ids: Sequence[int]) -> Self | None:
        """The edits that `params` ask for, or None."""
        bias = params.logit_bias or {}
        end_ids = stop_token_ids if params.min_tokens > 0 else ()
        bad_words = tuple(word for word in params.bad_words_token_ids if word)
        if params.allowed_token_ids is None and not bias and not end_ids and not bad_words:
            return None
        return cls(
            allowed=None
            if params.allowed_token_ids is None
            else np.unique(np.array(params.allowed_token_ids, np.int64)),
            bias_ids=np.array(list(bias), np.int64),
            bias_values=np.array(list(bias.values()), np.float32),
            end_ids=np.unique(np.array(end_ids, np.int64)),
            min_tokens=params.min_tokens,
            bad_words=bad_words,
        )


@dataclass(slots=True)
class _AllowList:
    rows: torch.Tensor
    """int64 [num_rows]"""
    index: torch.Tensor
    """int64 [num_allowed]: row * vocab_size + id"""


@dataclass(slots=True)
class _EndTokens:
    index: torch.Tensor
    slots: torch.Tensor
    """int64 [n]: the slot of each entry."""
    min_tokens: torch.Tensor
    """int32 [n]"""


@dataclass(slots=True)
class _BadWords:
    """n words; their prefixes, all but the last token of each, one after the other."""

    index: torch.Tensor
    slots: torch.Tensor
    prefix_len: torch.Tensor
    """int32 [n]"""
    prefix: torch.Tensor
    """int32 [sum(prefix_len)]"""
    words: torch.Tensor
    """int64 [sum(prefix_len)]: the word of each token of `prefix`."""
    offsets: torch.Tensor
    """int64 [sum(prefix_len)]: its place, counted from the end of the output: -1 is the last token."""


class EditBatch:
    """The edits of the requests of one batch as flat device tensors; serves every step with the same rows."""

    def __init__(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        edits: Sequence[LogitEdits],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`rows` [n] of the logits carry the `edits` [n] of the requests in `slots` [n]."""
        self._device = device
        self._allowed = self._gather_allowed(rows, edits, vocab_size)
        self._end_tokens = self._gather_end_tokens(rows, slots, edits, vocab_size)
        self._bad_words = self._gather_bad_words(rows, slots, edits, vocab_size)
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        index = flat_array([row * vocab_size + e.bias_ids for row, e in zip(rows, edits, strict=True)], np.int64)
        if len(index):
            values = flat_array([e.bias_values for e in edits], np.float32)
            self._bias = to_device(index, device), to_device(values, device)

    def apply(self, logits: torch.Tensor, tokens: TokenTable) -> None:
        """Change `logits` [num_rows, vocab_size], float32 and contiguous, in place."""
        flat = logits.view(-1)
        if self._allowed is not None:
            kept = flat[self._allowed.index]
            logits.index_fill_(0, self._allowed.rows, _MINUS_INFINITY)
            flat.index_copy_(0, self._allowed.index, kept)
        if self._bad_words is not None:
            flat.scatter_add_(0, self._bad_words.index, _where_minus_infinity(self._bad_word_hits(tokens)))
        if self._end_tokens is not None:
            ends = self._end_tokens
            num_output = tokens.num_tokens[ends.slots] - tokens.num_prompt[ends.slots]
            flat.scatter_add_(0, ends.index, _where_minus_infinity(num_output < ends.min_tokens))
        if self._bias is not None:
            flat.scatter_add_(0, *self._bias)

    def _bad_word_hits(self, tokens: TokenTable) -> torch.Tensor:
        """bool [n]: whether the output of the word's request ends in the word's prefix."""
        words = self._bad_words
        assert words is not None
        num_tokens = tokens.num_tokens[words.slots]
        long_enough = words.prefix_len <= num_tokens - tokens.num_prompt[words.slots]
        if len(words.prefix) == 0:
            return long_enough
        columns = (num_tokens[words.words] + words.offsets).clamp_(min=0)
        differs = tokens.token_ids[words.slots[words.words], columns] != words.prefix
        num_different = torch.zeros_like(words.prefix_len).index_add_(0, words.words, differs.to(torch.int32))
        return long_enough & (num_different == 0)

    def _gather_allowed(
        self, rows: NDArray[np.int64], edits: Sequence[LogitEdits], vocab_size: int
    ) -> _AllowList | None:
        pairs = [(row, e.allowed) for row, e in zip(rows, edits, strict=True) if e.allowed is not None]
        if not pairs:
            return None
        index = flat_array([row * vocab_size + allowed for row, allowed in pairs], np.int64)
        only_rows = np.array([row for row, _ in pairs], np.int64)
        return _AllowList(to_device(only_rows, self._device), to_device(index, self._device))

    def _gather_end_tokens(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], edits: Sequence[LogitEdits], vocab_size: int
    ) -> _EndTokens | None:
        index = flat_array([row * vocab_size + e.end_ids for row, e in zip(rows, edits, strict=True)], np.int64)
        if not len(index):
            return None
        counts = [len(e.end_ids) for e in edits]
        min_tokens = np.repeat(np.array([e.min_tokens for e in edits], np.int32), counts)
        return _EndTokens(
            to_device(index, self._device),
            to_device(np.repeat(slots, counts), self._device),
            to_device(min_tokens, self._device),
        )

    def _gather_bad_words(
        self, rows: NDArray[np.int64], slots: NDArray[np.int64], edits: Sequence[LogitEdits], vocab_size: int
    ) -> _BadWords | None:
        words = [(row, slot, word) for row, slot, e in zip(rows, slots, edits, strict=True) for word in e.bad_words]
        if not words:
            return None
        prefix_len = np.array([len(word) - 1 for _, _, word in words], np.int32)
        prefixes = [np.array(word[:-1], np.int32) for _, _, word in words]
        offsets = [np.arange(-length, 0) for length in prefix_len.tolist()]
        return _BadWords(
            index=to_device(np.array([row * vocab_size + word[-1] for row, _, word in words], np.int64), self._device),
            slots=to_device(np.array([slot for _, slot, _ in words], np.int64), self._device),
            prefix_len=to_device(prefix_len, self._device),
            prefix=to_device(flat_array(prefixes, np.int32), self._device),
            words=to_device(np.repeat(np.arange(len(words)), prefix_len), self._device),
            offsets=to_device(flat_array(offsets, np.int64), self._device),
        )


def _where_minus_infinity(hits: torch.Tensor) -> torch.Tensor:
    """float32: minus infinity where `hits`, else 0."""
    return torch.where(hits, _MINUS_INFINITY, 0.0).to(torch.float32)
