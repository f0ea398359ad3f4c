"""Stages of a pipeline on one GPU, in one process: with its graphs and streams, and messages through its memory."""

from collections.abc import Callable

import pytest
import torch

from tests.engine_core.worker.conftest import BLOCK_SIZE
from tests.engine_core.worker.test_cuda_stages import add_all, check_same, whole
from tests.engine_core.worker.test_stages import GREEDY, config_of, prompts
from tests.support.core_requests import CoreRequests
from tests.support.device_waits import refuse_synchronization
from tests.support.local_stages import LocalStages
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.worker.rehearsal import GREEDY as REHEARSED
from tokenmill_engine.worker.rehearsal import rehearsal_plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("with_graphs", [False, True])
@pytest.mark.parametrize("split", [(1, 2), (1, 1, 1)])
def test_answers_are_those_of_one_worker_on_the_cpu(split: tuple[int, ...], with_graphs: bool) -> None:
    config = config_of(split)
    stages = LocalStages(config, CUDA, with_graphs=with_graphs)
    found = CoreRequests(config, stages, stages.capacity)
    add_all(found)
    check_same(found.run(), whole(add_all))
    assert not any(stages.queues)
    assert all(bool(graphs.used) == with_graphs for graphs in stages.graphs)


@pytest.mark.parametrize("with_graphs", [False, True])
def test_no_stage_waits_for_the_device(with_graphs: bool) -> None:
    config = config_of((1, 1, 1))
    stages = LocalStages(config, CUDA, with_graphs=with_graphs, launching=refuse_synchronization)
    requests = CoreRequests(config, stages, stages.capacity)
    for number, prompt in enumerate(prompts(10)):
        sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=9, ignore_eos=True) if number % 2 else GREEDY
        requests.add(number, prompt, sampling)
    assert all(len(told.tokens) in (9, 20) for told in requests.run())


def slow_down(function: Callable[..., object]) -> Callable[..., object]:
    """Some 50 ms on the device before `function`."""

    def slowed(*arguments: object, **named: object) -> object:
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        return function(*arguments, **named)

    return slowed


def measured_pause_s() -> float:
    """Seconds of the pause, which is counted in cycles: a card that was idle begins with slower ones."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    started.record()
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) * 1e-3


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_step_takes_as_long_as_in_the_slowest_stage(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = LocalStages(config_of((1, 1, 1)), CUDA, with_graphs=False)
    plan = rehearsal_plan(2, 5, 1, BLOCK_SIZE, REHEARSED)
    for _ in range(2):
        quick = stages.submit(plan).result().elapsed_s
    model = stages.steps[slow].model
    monkeypatch.setattr(model, "run_layers", slow_down(model.run_layers))
    pauses = [measured_pause_s()]
    slowest = stages.submit(plan).result().elapsed_s
    pauses.append(measured_pause_s())
    assert 0 < quick < 0.5 * min(pauses)
    assert 0.9 * min(pauses) < slowest < 1.5 * max(pauses), f"{slowest} s with pauses of {pauses} s"
