"""Texts that a text encoder reads in one step, one after another without padding.

Attention alone needs them side by side: there they are padded in groups of similar lengths, so that a short text
beside long ones costs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_MAX_RATIO = 1.5
"""Of the longest text of a group to the shortest."""


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts that attention takes together."""

    tokens: torch.Tensor
    """int64 [num_texts, longest]: which token of the step stands where; padding is some token of the text."""
    mask: torch.Tensor | None
    """bool [num_texts, 1, 1, longest]: what may be looked at; None where all have the same length."""
    places: torch.Tensor
    """int64 [num_tokens of the group]: which of `tokens`, flattened, are not padding."""


@dataclass(frozen=True, slots=True)
class TextBatch:
    """All on the model's device; tokens are those of all texts in a row."""

    token_ids: torch.Tensor
    """int64 [num_tokens]"""
    positions: torch.Tensor
    """int64 [num_tokens]"""
    kinds: torch.Tensor
    """int64 [num_tokens]: 0 for those of a first text, 1 for those of a second."""
    lengths: torch.Tensor
    """int64 [num_texts]"""
    text_of_token: torch.Tensor
    """int64 [num_tokens]"""
    firsts: torch.Tensor
    """int64 [num_texts]: their first tokens."""
    groups: tuple[TextGroup, ...]


def make_batch(texts: Sequence[NDArray[np.int32]], seconds: Sequence[int], device: torch.device) -> TextBatch:
    """`seconds`: where in each of `texts` a second one begins; its length if there is none."""
    lengths = np.array([len(text) for text in texts], dtype=np.int64)
    firsts = np.cumsum(lengths) - lengths
    text_of_token = np.repeat(np.arange(len(texts)), lengths)
    positions = np.arange(int(lengths.sum())) - firsts[text_of_token]
    kinds = positions >= np.asarray(seconds, dtype=np.int64)[text_of_token]

    def put(values: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        # From memory that is not pinned: the driver has read it when this returns, and may wait for that.
        return torch.from_numpy(values).to(device, non_blocking=True)

    return TextBatch(
        token_ids=put(np.concatenate(texts).astype(np.int64)),
        positions=put(positions),
        kinds=put(kinds.astype(np.int64)),
        lengths=put(lengths),
        text_of_token=put(text_of_token),
        firsts=put(firsts),
        groups=tuple(_group(firsts[rows], lengths[rows], device) for rows in _similar(lengths)),
    )


def _similar(lengths: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """Texts in groups, by their number."""
    order = np.argsort(lengths, kind="stable")
    groups, first = [], 0
    for index in range(1, len(order) + 1):
        if index == len(order) or lengths[order[index]] > _MAX_RATIO * lengths[order[first]]:
            groups.append(order[first:index])
            first = index
    return groups


def _group(firsts: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> TextGroup:
    columns = np.arange(int(lengths.max()))
    is_token = columns < lengths[:, np.newaxis]
    tokens = firsts[:, np.newaxis] + np.where(is_token, columns, 0)
    mask = None if is_token.all() else torch.from_numpy(is_token[:, np.newaxis, np.newaxis]).to(device)
    places = torch.from_numpy(np.flatnonzero(is_token)).to(device)
    return TextGroup(torch.from_numpy(tokens).to(device), mask, places)
