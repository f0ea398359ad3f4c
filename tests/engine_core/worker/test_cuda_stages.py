"""Stages of a pipeline as GPUs run them, with their kernels interpreted and their models on the CPU, which hand each
other streams through memory: the answers of one worker that has the whole model, with exact sizes and padded ones."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.engine_core.worker.conftest import BLOCK_SIZE
from tests.engine_core.worker.test_stages import GREEDY, config_of, prompts, replace_tokens
from tests.support.core_requests import CoreRequests, Told
from tests.support.local_stages import LocalStages
from tests.support.model_loading import CPU
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import AbortRequests, SamplingParams
from tokenmill_engine.outputs import SampledTokens, StepPlan
from tokenmill_engine.worker.rehearsal import GREEDY as REHEARSED
from tokenmill_engine.worker.rehearsal import rehearsal_plan
from tokenmill_engine.worker.slots import SlotShape, SlotTables

pytestmark = pytest.mark.slow

SAMPLINGS = [
    replace_tokens(GREEDY, 7),
    SamplingParams(temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, repetition_penalty=1.3),
]


def whole(drive: Callable[[CoreRequests], None], **changes: int) -> list[Told]:
    config = config_of(None, **changes)
    alone = UniprocExecutor(config)
    requests = CoreRequests(config, alone, alone.initialize())
    drive(requests)
    told = requests.run()
    alone.shutdown()
    return told


def check_same(found: list[Told], expected: list[Told]) -> None:
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.tokens, ours.finishes) == (theirs.tokens, theirs.finishes)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        np.testing.assert_allclose(ours.prompt_logprobs, theirs.prompt_logprobs, atol=1e-4)


def add_all(requests: CoreRequests) -> None:
    """Chunks of prompts and streams that take turns, random and scored ones too."""
    for number, prompt in enumerate(prompts(7, longest=70)):
        requests.add(number, prompt, SAMPLINGS[number % len(SAMPLINGS)])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("split", [(1, 2), (1, 1, 1)])
def test_answers_are_those_of_one_worker(split: tuple[int, ...], padded: bool) -> None:
    config = config_of(split)
    stages = LocalStages(config, CPU, with_graphs=padded)
    found = CoreRequests(config, stages, stages.capacity)
    add_all(found)
    check_same(found.run(), whole(add_all))
    assert not any(stages.queues)
    # Steps that score prompts have no graph in the last stage, and the others send it as much as if they had.
    assert all(bool(graphs.used) == padded for graphs in stages.graphs)


def test_requests_that_are_preempted_and_slots_that_are_taken_over() -> None:
    texts = prompts(8, longest=30)
    config = config_of((2, 1), num_blocks=14)
    stages = LocalStages(config, CPU, with_graphs=True)
    requests = CoreRequests(config, stages, stages.capacity)
    ids = [requests.add(number, text, replace_tokens(GREEDY, 24)) for number, text in enumerate(texts)]
    for number in (0, 3):
        for _ in range(3):
            requests.step()
        requests.core.handle(AbortRequests([ids[number]]))
    requests.run()
    assert requests.core.scheduler.counters.num_preemptions > 0

    def drive(alone: CoreRequests) -> None:
        for number, text in enumerate(texts):
            alone.add(number, text, replace_tokens(GREEDY, 24))

    for number, expected in enumerate(whole(drive)):
        tokens = requests.told[ids[number]].tokens
        assert tokens == (expected.tokens[: len(tokens)] if number in (0, 3) else expected.tokens)


@pytest.mark.parametrize("slowest_s", [0.0, 1000.0])
def test_a_step_takes_as_long_as_in_the_slowest_stage(slowest_s: float) -> None:
    stages = LocalStages(config_of((1, 1, 1)), CPU, with_graphs=True)
    plan = rehearsal_plan(2, 5, 1, BLOCK_SIZE, REHEARSED)
    pending = [stages.runners[0].execute(plan)]
    message = stages.queues[1][0]
    times = torch.tensor([int(slowest_s * 1e9), 2_500_000_000]).view(torch.uint8)
    message.content = torch.cat([times, message.content[16:]])
    pending += [runner.execute(plan) for runner in stages.runners[1:]]
    first, second, last = [each.wait() for each in pending]
    assert first.num_new.tolist() == second.num_new.tolist() == [0, 0]
    assert last.num_new.tolist() == [1, 1]
    assert last.elapsed_s == pytest.approx(slowest_s)
    assert last.encoder_s == pytest.approx(2.5)


def test_a_step_that_fails_behind_the_last_layer_leaves_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = LocalStages(config_of((2, 1)), CPU, with_graphs=True)
    plan = rehearsal_plan(2, 5, 1, BLOCK_SIZE, REHEARSED)
    expected = stages.submit(plan).result().token_ids.tolist()

    def fail(*_: object) -> None:
        raise ValueError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(stages.steps[-1], "sample_shape", fail)
        with pytest.raises(ValueError, match="a fault"):
            stages.submit(plan)
    assert not any(stages.queues)
    assert stages.submit(plan).result().token_ids.tolist() == expected


def test_tokens_that_come_beside_a_step_that_is_refused_are_kept() -> None:
    """Other requests need them in the next step."""
    config = config_of((2, 1))
    stages = LocalStages(config, CPU, with_graphs=True)
    prompt = rehearsal_plan(1, 5, 1, BLOCK_SIZE, REHEARSED)
    one = np.ones(1, np.int32)
    decode = StepPlan(1, 0 * one, one, 5 * one, np.ones(1, np.bool_), 1)
    token = stages.submit(prompt).result().token_ids[0]
    expected = stages.submit(decode).result().token_ids.tolist()
    assert stages.submit(prompt).result().token_ids[0] == token
    stages.steps[0].inputs.tables.tokens.token_ids[0, 5] = 0
    refused = dataclasses.replace(
        prompt, starts=[], num_scheduled=1000 * one, sampled=SampledTokens(0 * one, 5 * one, token)
    )
    for runner in stages.runners:
        with pytest.raises(ValueError, match="more than the buffers hold"):
            runner.execute(refused)
    pending = [runner.execute(decode) for runner in stages.runners]
    assert pending[-1].wait().token_ids.tolist() == expected


def test_tokens_of_requests_that_are_gone_are_dropped() -> None:
    """Where a plan starts a request in a slot, what the last one in it got has come too late."""
    tables = SlotTables(SlotShape(4, 8, 1, 1, 500), CPU, shared=False)
    plan = rehearsal_plan(1, 3, 1, BLOCK_SIZE, REHEARSED)
    slots, positions, token_ids = (np.array(each, np.int32) for each in ([0, 3, 3], [3, 4, 5], [90, 91, 92]))
    plan = dataclasses.replace(plan, sampled=SampledTokens(slots, positions, token_ids))
    for offset, values in tables.sampled_changes(plan):
        tables.buffer[offset : offset + len(values)] = torch.tensor(values)
    assert tables.tokens.token_ids.tolist() == [[0] * 8, [0] * 8, [0] * 8, [0, 0, 0, 0, 91, 92, 0, 0]]
