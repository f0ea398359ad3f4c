"""Tokens that the grammars of some rows allow: all others get minus infinity, on the host's word for each step."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.outputs import TokenMasks
from tokenmill_kernels.cpu import sampling as native

_MINUS_INFINITY = float("-inf")


@dataclass(slots=True, frozen=True)
class SampleMasks:
    """`outputs.TokenMasks` of the rows that sample."""

    rows: NDArray[np.int32]
    """[n] of the logits, ascending."""
    bits: NDArray[np.int32]
    """[n, ceil(vocab_size / 32)]"""

    @classmethod
    def of(cls, masks: TokenMasks | None, sample_rows: NDArray[np.int64]) -> "SampleMasks | None":
        """`masks` of a plan in which the rows `sample_rows` [num_samples], ascending, sample."""
        if masks is None:
            return None
        return cls(np.searchsorted(sample_rows, masks.rows).astype(np.int32), masks.bits)


def apply_on_host(logits: torch.Tensor, masks: SampleMasks) -> None:
    """Change `logits` [num_rows, vocab_size], float32 on the CPU, in place."""
    if native.is_available():
        native.mask(logits, torch.from_numpy(masks.rows), torch.from_numpy(masks.bits))
        return
    for row, bits in zip(masks.rows.tolist(), masks.bits, strict=True):
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little", count=logits.shape[1])
        logits[row].masked_fill_(torch.from_numpy(allowed) == 0, _MINUS_INFINITY)
