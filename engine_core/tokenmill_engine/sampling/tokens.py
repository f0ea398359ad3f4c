"""Tokens of every slot, as the sampler reads them. Owned and written by the worker."""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class TokenTable:
    """Persistent device tables, one row per slot."""

    token_ids: torch.Tensor
    """int32 [num_slots, max_len]: prompt, then output; entries past `num_tokens` are undefined, but valid ids."""
    num_tokens: torch.Tensor
    """int32 [num_slots]: known tokens."""
    num_prompt: torch.Tensor
    """int32 [num_slots]: tokens of the prompt."""


@dataclass(slots=True)
class Rows:
    """Some rows of a batch and the slots of their requests, on the device."""

    index: torch.Tensor
    """int64 [n]: row of the logits."""
    slots: torch.Tensor
    """int64 [n]"""

    def __len__(self) -> int:
        return len(self.index)

    def pieces(self, size: int) -> "list[Rows]":
        """Consecutive parts of at most `size` rows."""
        if len(self) <= size:
            return [self]
        return [Rows(self.index[i : i + size], self.slots[i : i + size]) for i in range(0, len(self), size)]
