"""Tokens that are known before anybody samples them: a grammar leaves no choice (jump-forward).

They stand behind the token that a step under way yields. So the next step computes them all at once, as a chunk, while
that step still runs; its result brings them along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.outputs import StepPlan, StepResult, TokenAppend
from tokenmill_engine.scheduler.slots import IntArray, SlotTable


class Foresight:
    """What is known of the rows of one scheduler."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._by_step: dict[int, dict[int, list[int]]] = {}
        """Tokens behind the one that a row yields."""
        self._appends: list[tuple[int, TokenAppend]] = []
        """Those that no plan has brought to the workers, with the epoch of the slot."""

    def add(self, plan: StepPlan, epochs: NDArray[np.int64], known: Mapping[int, Sequence[int]]) -> None:
        """The token of each row in `known` is followed by these. `plan` is the one made last, when its slots had these
        `epochs`: what is of requests that have left since is left out, and what would exceed the length of an output.
        """
        table = self._table
        kept: dict[int, list[int]] = {}
        for row, token_ids in known.items():
            slot = int(plan.slots[row])
            if table.epochs[slot] != epochs[row]:
                continue
            start = int(table.num_tokens[slot])
            fitting = list(token_ids[: int(table.max_total[slot]) - start])
            if fitting:
                kept[row] = fitting
                table.num_tokens[slot] = start + len(fitting)
                self._appends.append((int(table.epochs[slot]), TokenAppend(slot, start, fitting)))
        if kept:
            self._by_step[plan.step] = kept

    def appends(self, slots: IntArray) -> list[TokenAppend]:
        """What a plan with rows of `slots` has to bring: what is of other requests comes with theirs, since a plan may
        fail, and its requests with it. It is not given again, and what is of requests that have left never."""
        if not self._appends:
            return []
        computed = set(slots.tolist())
        living = [(epoch, append) for epoch, append in self._appends if self._table.epochs[append.slot] == epoch]
        self._appends = [each for each in living if each[1].slot not in computed]
        return [append for _, append in living if append.slot in computed]

    def completed(self, plan: StepPlan, result: StepResult) -> StepResult:
        """`result` with what is known to follow its tokens."""
        known = self._by_step.pop(plan.step, {})
        known = {row: token_ids for row, token_ids in known.items() if result.num_new[row]}
        if not known:
            return result
        num_new = result.num_new.copy()
        width = max(int(num_new[row]) + len(token_ids) for row, token_ids in known.items())
        completed = np.full((plan.num_reqs, max(width, result.token_ids.shape[1])), -1, dtype=np.int32)
        completed[:, : result.token_ids.shape[1]] = result.token_ids
        for row, token_ids in known.items():
            completed[row, num_new[row] : num_new[row] + len(token_ids)] = token_ids
            num_new[row] += len(token_ids)
        return replace(result, token_ids=completed, num_new=num_new)
