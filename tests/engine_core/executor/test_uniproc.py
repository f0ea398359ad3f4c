"""Steps through the executor: in order, one failing alone, equal tokens at any depth."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, tiny_engine_config
from tests.support.step_driver import Generation, StepDriver
from tokenmill_engine.config.engine import CacheConfig
from tokenmill_engine.errors import EngineError, StartupError
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan


@pytest.fixture
def executor() -> Iterator[UniprocExecutor]:
    executor = UniprocExecutor(tiny_engine_config())
    executor.initialize()
    yield executor
    executor.shutdown()


def run(executor: UniprocExecutor, depth: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    generations = [
        Generation(rng.integers(3, 500, length).tolist(), 15, SamplingParams(temperature=t, seed=length, top_p=0.95))
        for length, t in ((1, 0.0), (40, 0.9), (17, 0.0), (90, 1.0), (3, 0.7))
    ]
    driver = StepDriver(
        executor.submit, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=32, depth=depth
    )
    driver.run(generations)
    return [generation.output for generation in generations]


def test_steps_ahead_change_no_token(executor: UniprocExecutor) -> None:
    synchronous = run(executor, depth=1)
    assert run(executor, depth=2) == synchronous
    assert run(executor, depth=4) == synchronous


def broken_plan(step: int) -> StepPlan:
    """A plan for a slot that does not exist."""
    one = np.array([1], np.int32)
    return StepPlan(step, np.array([10_000], np.int32), one, np.zeros(1, np.int32), np.array([True]), 1)


def test_a_failing_step_harms_no_other(executor: UniprocExecutor) -> None:
    before = run(executor, depth=2)
    first = executor.submit(rehearsal_plan(2, 3, 1, BLOCK_SIZE, GREEDY))
    bad = executor.submit(broken_plan(7))
    last = executor.submit(rehearsal_plan(2, 3, 1, BLOCK_SIZE, GREEDY))
    assert first.result().num_new.tolist() == [1, 1]
    with pytest.raises(EngineError, match=r"step 7 failed: IndexError"):
        bad.result()
    assert last.result().token_ids.tolist() == first.result().token_ids.tolist()
    assert run(executor, depth=2) == before


def test_equal_steps_give_equal_results(executor: UniprocExecutor) -> None:
    handles = [executor.submit(rehearsal_plan(1, 64, 1, BLOCK_SIZE, GREEDY)) for _ in range(5)]
    results = [handle.result() for handle in handles]
    assert len({result.token_ids.tobytes() for result in results}) == 1


def test_start_errors_reach_the_caller() -> None:
    executor = UniprocExecutor(
        tiny_engine_config(cache=CacheConfig(num_gpu_blocks_override=2), max_model_len_explicit=True)
    )
    with pytest.raises(StartupError, match="largest --max-model-len that fits is 32"):
        executor.initialize()
    executor.shutdown()


def test_shutdown_finishes_what_was_submitted_and_may_be_repeated() -> None:
    executor = UniprocExecutor(tiny_engine_config())
    executor.initialize()
    handles = [executor.submit(rehearsal_plan(1, 64, 1, BLOCK_SIZE, GREEDY)) for _ in range(4)]
    executor.shutdown()
    assert [handle.result().num_new.tolist() for handle in handles] == [[1]] * 4
    executor.shutdown()


def test_masks_that_follow_bind_as_those_that_come_with_a_plan(executor: UniprocExecutor) -> None:
    plan = rehearsal_plan(2, 3, 1, BLOCK_SIZE, GREEDY)
    free = executor.submit(plan).result().token_ids[:, 0].tolist()
    bits = np.zeros((1, -(-tiny_engine_config().model.architecture.vocab_size // 32)), np.int32)
    bits[0, 1] = 1 << 9
    masks = TokenMasks(np.array([1], np.int32), bits)
    expected = executor.submit(replace(plan, masks=masks)).result().token_ids[:, 0].tolist()
    assert expected == [free[0], 41]
    for following, tokens in ((masks, expected), (None, free)):
        handle = executor.submit(replace(plan, masks_follow=True))
        executor.mask(following)
        assert handle.result().token_ids[:, 0].tolist() == tokens


def test_a_step_that_fails_before_its_masks_come_harms_no_other(executor: UniprocExecutor) -> None:
    bad = executor.submit(replace(broken_plan(7), masks_follow=True))
    executor.mask(None)
    with pytest.raises(EngineError, match=r"step 7 failed: IndexError"):
        bad.result()
    assert executor.submit(rehearsal_plan(2, 3, 1, BLOCK_SIZE, GREEDY)).result().num_new.tolist() == [1, 1]


def test_shutdown_does_not_wait_for_masks() -> None:
    executor = UniprocExecutor(tiny_engine_config())
    executor.initialize()
    handle = executor.submit(replace(rehearsal_plan(1, 4, 1, BLOCK_SIZE, GREEDY), masks_follow=True))
    executor.shutdown()
    assert handle.result().num_new.tolist() == [1]
