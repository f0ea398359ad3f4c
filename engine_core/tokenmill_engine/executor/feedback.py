"""Sampled tokens on their way back to the stages of a pipeline that did not sample them. Torch-free.

The last stage samples and the first one embeds, so a token goes through the host: it comes with a step's result, and
goes out beside the next plan. Plans are carried out in order everywhere, so what is sent beside a plan is written
before anything in the plan.
"""

import numpy as np

from tokenmill_engine.outputs import SampledTokens, StepPlan, StepResult


class TokenFeedback:
    """Keeps what was sampled until it is sent."""

    def __init__(self) -> None:
        self._started: dict[int, int] = {}
        """By slot, the step that began its request."""
        self._pending: list[SampledTokens] = []

    def sent(self, plan: StepPlan) -> SampledTokens | None:
        """What goes out beside `plan`, which is the next one; it is not given again. None if there is nothing."""
        pending, self._pending = self._pending, []
        self._started.update((start.slot, plan.step) for start in plan.starts)
        if not pending:
            return None
        columns = ([getattr(each, name) for each in pending] for name in ("slots", "positions", "token_ids"))
        return SampledTokens(*(np.concatenate(column) for column in columns))

    def received(self, plan: StepPlan, result: StepResult) -> None:
        """The result of `plan` is here. Tokens of requests whose slot another one has taken since are dropped."""
        rows = result.num_new.nonzero()[0]
        rows = rows[[self._started.get(slot, 0) <= plan.step for slot in plan.slots[rows].tolist()]]
        counts = result.num_new[rows]
        ends = plan.num_computed[rows] + plan.num_scheduled[rows]
        columns = np.arange(result.token_ids.shape[1])
        is_new = columns < counts[:, np.newaxis]
        positions = (ends[:, np.newaxis] + columns)[is_new].astype(np.int32)
        if len(positions):
            slots = np.repeat(plan.slots[rows], counts)
            self._pending.append(SampledTokens(slots, positions, result.token_ids[rows][is_new]))
