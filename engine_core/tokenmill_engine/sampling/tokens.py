"""Tokens of every slot, as the sampler reads them, and rows of a batch with the slots they belong to."""

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

INVALID_TOKEN: Final = -1
"""Stands for the token of a row whose logits are not numbers, or all masked."""


@dataclass(slots=True)
class TokenTable:
    """Persistent device tables, one row per slot. Owned and written by the worker."""

    token_ids: torch.Tensor
    """int32 [num_slots, max_len]: prompt, then output; entries past `num_tokens` are undefined, but valid ids."""
    num_tokens: torch.Tensor
    """int32 [num_slots]: known tokens."""
    num_prompt: torch.Tensor
    """int32 [num_slots]: tokens of the prompt."""


@dataclass(slots=True)
class Rows:
    """Some rows of a batch and the slots of their requests."""

    index: torch.Tensor
    """int64 [n]: row of the logits."""
    slots: torch.Tensor
    """int64 [n]"""

    @classmethod
    def where(cls, mask: NDArray[np.bool_], slots: NDArray[np.int32]) -> Self | None:
        """The rows that `mask` [num_rows] picks, whose requests are in `slots` [num_rows]; None if it picks none."""
        index = np.flatnonzero(mask)
        if len(index) == 0:
            return None
        return cls(torch.from_numpy(index), torch.from_numpy(slots[index].astype(np.int64)))

    def __len__(self) -> int:
        return len(self.index)

    def pieces(self, size: int) -> "list[Rows]":
        """Consecutive parts of at most `size` rows."""
        if len(self) <= size:
            return [self]
        return [Rows(self.index[i : i + size], self.slots[i : i + size]) for i in range(0, len(self), size)]
