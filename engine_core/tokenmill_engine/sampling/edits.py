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
from tokenmill_engine.sampling.transfer import to_device

_MINUS_INFINITY = float("-inf")


@dataclass(slots=True, frozen=True)
class LogitEdits:
    """What one request wants changed, as arrays that only need to be joined. Token ids are in the vocabulary."""

    allowed: NDArray[np.int64] | None
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    end_ids: NDArray[np.int64]
    """Forbidden until `min_tokens` tokens are out."""
    min_tokens: int
    bad_ids: NDArray[np.int64]
    """[num_words]: the last token of each bad word, forbidden where the output ends in the others, its prefix."""
    prefix_lens: NDArray[np.int64]
    """[num_words]"""
    prefix: NDArray[np.int64]
    """[sum(prefix_lens)]: the prefixes, one after the other."""
    prefix_offsets: NDArray[np.int64]
    """[sum(prefix_lens)]: the place of each, counted from the end of the output: -1 is the last token."""

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
            bad_ids=np.array([word[-1] for word in bad_words], np.int64),
            prefix_lens=np.array([len(word) - 1 for word in bad_words], np.int64),
            prefix=np.array([token for word in bad_words for token in word[:-1]], np.int64),
            prefix_offsets=np.array([offset for word in bad_words for offset in range(1 - len(word), 0)], np.int64),
        )


class EditBatch:
    """The edits of the requests of one batch as flat device tensors; serves every step with the same rows.

    An index is a place in the flat logits. All integers cross to the device in one copy.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        slots: NDArray[np.int64],
        edits: Sequence[LogitEdits],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """`rows` [n] of the logits carry the `edits` [n] of the requests in `slots` [n]."""
        starts = rows * vocab_size
        limited = np.array([one.allowed is not None for one in edits])
        allowed, _ = _joined(starts[limited], [one.allowed for one in edits if one.allowed is not None])
        bias, _ = _joined(starts, [one.bias_ids for one in edits])
        ends, num_ends = _joined(starts, [one.end_ids for one in edits])
        bad_words, num_words = _joined(starts, [one.bad_ids for one in edits])
        prefix_lens = np.concatenate([one.prefix_lens for one in edits])
        parts = (
            rows[limited],
            allowed,
            bias,
            ends,
            np.repeat(slots, num_ends),
            np.repeat(np.array([one.min_tokens for one in edits]), num_ends),
            bad_words,
            np.repeat(slots, num_words),
            prefix_lens,
            np.repeat(np.arange(len(prefix_lens)), prefix_lens),
            np.concatenate([one.prefix for one in edits]),
            np.concatenate([one.prefix_offsets for one in edits]),
        )
        sent = torch.split(to_device(np.concatenate(parts), device), [len(part) for part in parts])
        self._limited_rows, self._allowed, self._bias = sent[:3]
        self._ends, self._end_slots, self._min_tokens = sent[3:6]
        self._bad_words, self._word_slots, self._prefix_lens = sent[6:9]
        self._prefix_words, self._prefix, self._prefix_offsets = sent[9:]
        self._bias_values = to_device(np.concatenate([one.bias_values for one in edits]), device)

    def apply(self, logits: torch.Tensor, tokens: TokenTable) -> None:
        """Change `logits` [num_rows, vocab_size], float32 and contiguous, in place."""
        flat = logits.view(-1)
        if len(self._limited_rows):
            kept = flat[self._allowed]
            logits.index_fill_(0, self._limited_rows, _MINUS_INFINITY)
            flat.index_copy_(0, self._allowed, kept)
        if len(self._bad_words):
            flat.scatter_add_(0, self._bad_words, _where_minus_infinity(self._bad_word_hits(tokens)))
        if len(self._ends):
            num_output = tokens.num_tokens[self._end_slots] - tokens.num_prompt[self._end_slots]
            flat.scatter_add_(0, self._ends, _where_minus_infinity(num_output < self._min_tokens))
        if len(self._bias):
            flat.scatter_add_(0, self._bias, self._bias_values)

    def _bad_word_hits(self, tokens: TokenTable) -> torch.Tensor:
        """bool [num_words]: whether the output of the word's request ends in the word's prefix."""
        num_tokens = tokens.num_tokens[self._word_slots]
        long_enough = self._prefix_lens <= num_tokens - tokens.num_prompt[self._word_slots]
        if len(self._prefix) == 0:
            return long_enough
        columns = (num_tokens[self._prefix_words] + self._prefix_offsets).clamp_(min=0)
        differs = tokens.token_ids[self._word_slots[self._prefix_words], columns] != self._prefix
        num_different = torch.zeros_like(self._prefix_lens).index_add_(0, self._prefix_words, differs.to(torch.int64))
        return long_enough & (num_different == 0)


def _joined(starts: NDArray[np.int64], ids: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The index of each of `ids`, one array per row that begins at one of `starts` [n], and how many each row has."""
    counts = np.array([len(one) for one in ids], np.int64)
    if not counts.any():
        return np.empty(0, np.int64), counts
    return np.repeat(starts, counts) + np.concatenate(ids), counts


def _where_minus_infinity(hits: torch.Tensor) -> torch.Tensor:
    """float32: minus infinity where `hits`, else 0."""
    return torch.where(hits, _MINUS_INFINITY, 0.0).to(torch.float32)
