"""Steps whose masks follow."""

from typing import Any

import numpy as np
import pytest

from tokenmill_engine.errors import EngineDeadError, EngineError
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.worker.runner import execute_masked

NOTHING = np.zeros(0, np.int32)
PLAN = StepPlan(7, NOTHING, NOTHING, NOTHING, np.zeros(0, np.bool_), 0, masks_follow=True)


@pytest.mark.parametrize("fails_too", [False, True])
def test_masks_are_taken_in_though_the_step_failed(fails_too: bool) -> None:
    """They would be those of the next step. What went wrong first is told."""
    received: list[int] = []

    class Failing:
        def launch(self, plan: StepPlan) -> Any:
            raise EngineError(f"no memory for step {plan.step}")

    def receive() -> TokenMasks | None:
        received.append(1)
        if fails_too:
            raise EngineDeadError("nobody sends masks any more")
        return None

    worker: Any = Failing()
    with pytest.raises(EngineError, match="no memory for step 7"):
        execute_masked(worker, PLAN, receive)
    assert len(received) == 1
