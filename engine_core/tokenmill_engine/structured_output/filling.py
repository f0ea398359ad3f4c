"""Masks of several outputs at once: on several cores, where nothing else is to be done on them."""

import os
from collections.abc import Sequence
from typing import Final

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask_par
from numpy.typing import NDArray

from tokenmill_engine.structured_output.grammar import GrammarError, Matcher
from tokenmill_engine.structured_output.guidance_backend import GuidanceMatcher

_MAX_THREADS: Final = 8
"""A mask takes up to a twentieth of a millisecond: more threads would mostly wait for each other."""
_FEWEST: Final = 4
"""So few take less time than it does to wake threads."""


class MaskFiller:
    """Used by one thread."""

    def __init__(self, *, computes_here: bool) -> None:
        """`computes_here`: the model runs on this machine's cores, and has work for all of them."""
        self._num_threads = 1 if computes_here else min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2)
        self._executor: llguidance.LLExecutor | None = None

    def fill(self, bits: NDArray[np.int32], matchers: Sequence[tuple[int, Matcher]]) -> dict[int, GrammarError]:
        """Write what may follow in each of `matchers` into its row of `bits`, C-contiguous as `outputs.TokenMasks` has
        it. Returns why that failed, by row."""
        failures: dict[int, GrammarError] = {}
        together = [(row, inner) for row, each in matchers if isinstance(inner := each.innermost, GuidanceMatcher)]
        if self._num_threads < 2 or len(together) < _FEWEST:
            together = []
        else:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(self._num_threads)
            fill_next_token_bitmask_par(self._executor, [(each.library, row) for row, each in together], bits)
        filled = dict(together)
        for row, matcher in matchers:
            try:
                if row in filled:
                    filled[row].check()
                else:
                    matcher.fill(bits, row)
            except GrammarError as error:
                failures[row] = error
        return failures
