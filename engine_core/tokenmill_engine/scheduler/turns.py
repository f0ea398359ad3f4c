"""Which running requests a step may compute where the model's layers lie in stages, one after another.

As many steps are under way as there are stages, each in another one, so that none is idle. A request waits for its
sampled token before it is computed again: the first stage learns it from the host, which learns it from the last one.
So the streams take turns: a step takes its share of them and leaves the others to the steps right after it. Chunks of
one prompt need no token that is not known, and may follow each other.
"""

from collections.abc import Sequence

from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.scheduler.slots import IntArray, SlotTable


def steps_under_way(num_stages: int, async_scheduling: bool) -> int:
    """How many steps are in flight at once: one in each stage and, with asynchronous scheduling, one more that the
    first stage can begin while the host takes a result in. Of several stages, that one has prompts only."""
    return num_stages + 1 if async_scheduling else num_stages


class Turns:
    """The share of one step. Looks at the table and changes nothing."""

    def __init__(self, num_stages: int, table: SlotTable) -> None:
        self._num_stages = num_stages
        self._table = table

    def ready(self, running: IntArray) -> IntArray:
        """Those of the `running` slots whose tokens are all known to the host; the others have one in flight."""
        table = self._table
        is_known = table.num_tokens[running] == table.num_prompt[running] + table.num_outputs[running]
        known: IntArray = running[is_known]
        return known

    def is_in_flight(self, slot: int) -> bool:
        """Whether any step in flight computes something for the request in `slot`."""
        return bool(self._table.num_computed[slot] != self._table.num_committed[slot])

    def share(self, num_ready: int, num_elsewhere: int, in_flight: Sequence[StepPlan]) -> int:
        """How many of `num_ready` streams the next step takes. `num_elsewhere` others are in the steps `in_flight`.

        The steps of one round take as many each, as nearly as can be, also when streams came or went since the last
        round. Nobody is passed over for ever, whoever comes first: a round has room for all.
        """
        num_left = self._num_stages - sum(bool(plan.samples.any()) for plan in in_flight)
        if num_left <= 0:
            return 0
        return min(-(-num_ready // num_left), -(-(num_ready + num_elsewhere) // self._num_stages))
