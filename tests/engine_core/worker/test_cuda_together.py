"""Steps of workers that wait for each other, which fail: before the device hears of them, and later."""

from dataclasses import replace

import numpy as np
import pytest

from tests.engine_core.worker.conftest import BLOCK_SIZE
from tests.engine_core.worker.test_cuda_steps import Calls, make_runner
from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.worker.cuda_steps import CudaSteps
from tokenmill_engine.worker.cuda_together import RunnerTogether
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan


def test_a_step_that_fails_half_way_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(Calls(), padded=False)
    steps = runner._device
    assert isinstance(steps, CudaSteps)
    together = RunnerTogether(runner, steps.inputs.ring)
    plan = rehearsal_plan(2, 8, 1, BLOCK_SIZE, GREEDY)
    assert together.execute(plan).wait().num_new.tolist() == [1, 1]
    with pytest.raises(ValueError, match="more than the buffers hold"):
        together.execute(replace(plan, num_scheduled=np.full(2, 10_000, np.int32)))
    assert together.execute(plan).wait().num_new.tolist() == [1, 1]

    def exhausted(*_: object) -> None:
        raise MemoryError("no memory for logits")

    monkeypatch.setattr(steps.chooser, "choose", exhausted)
    with pytest.raises(EngineDeadError, match="step 0 failed half-way: MemoryError: no memory for logits"):
        together.execute(plan)
    with pytest.raises(EngineDeadError, match="step 0 failed half-way: MemoryError: no memory for logits"):
        together.launch(plan).choose(None)


def test_masks_may_follow() -> None:
    runner = make_runner(Calls(), padded=False)
    steps = runner._device
    assert isinstance(steps, CudaSteps)
    together = RunnerTogether(runner, steps.inputs.ring)
    plan = rehearsal_plan(2, 8, 1, BLOCK_SIZE, GREEDY)
    expected = together.execute(plan).wait()
    assert together.launch(plan).choose(None).wait().token_ids.tolist() == expected.token_ids.tolist()
    with pytest.raises(ValueError, match="more than the buffers hold"):
        together.launch(replace(plan, num_scheduled=np.full(2, 10_000, np.int32)))
