"""Steps as a GPU runs them, with their kernels interpreted and the model on the CPU: the tokens of the CPU's own steps,
with exact sizes and with padded ones, as graphs have them."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS
from tests.support.generations import SAMPLED, prompts
from tests.support.model_loading import CPU, model_config
from tests.support.step_driver import GREEDY, Generation, StepDriver
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.models.loader import build_model, load_weights
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.sampling import table as columns
from tokenmill_engine.worker.cuda_graphs import Call
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.cuda_steps import CudaSteps
from tokenmill_engine.worker.model_runner import ModelRunner
from tokenmill_engine.worker.rehearsal import rehearsal_plan
from tokenmill_engine.worker.shapes import Ladder, SampleShape, StepShape
from tokenmill_engine.worker.slots import SlotShape, SlotTables
from tokenmill_engine.worker.worker import Worker
from tokenmill_kernels import ops

pytestmark = pytest.mark.slow

NUM_OUTPUT, MAX_LEN, BUDGET = 6, 528, 64


class Calls:
    """In place of graphs: the calls that they would be captured from."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, Call] = {}
        self.used: set[Hashable] = set()

    def replay(self, key: Hashable) -> torch.Tensor | None:
        if key not in self.calls:
            return None
        self.used.add(key)
        return self.calls[key]()


def make_runner(calls: Calls, *, padded: bool, folder: Path | None = None, group: Group = ALONE) -> ModelRunner:
    config = model_config(folder or cached_tiny_model("llama"))
    model = build_model(config, CPU, group=group)
    load_weights(model, config)
    model.finalize(allow_fused=False)
    shape = SlotShape(NUM_SLOTS, MAX_LEN, MAX_LEN // BLOCK_SIZE, 1, model.architecture.vocab_size)
    tables = SlotTables(shape, CPU, shared=False)
    ladder = Ladder(NUM_SLOTS, BUDGET)
    inputs = CudaInputs(tables, BLOCK_SIZE, ladder.num_rows, BUDGET)
    steps = CudaSteps(model, inputs, calls, ladder if padded else None)
    steps.kv_caches = [
        ops.allocate_kv_cache(NUM_BLOCKS, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, model.dtype, CPU)
        for spec in model.kv_specs
    ]
    calls.calls = dict(steps.graph_calls())
    return ModelRunner(model, tables, steps)


def generate(on: ModelRunner | Worker, params: list[SamplingParams], depth: int) -> list[Generation]:
    generations = [Generation(prompt, NUM_OUTPUT, p) for prompt, p in zip(prompts(), params, strict=True)]

    class Submitted:
        def __init__(self, plan: StepPlan) -> None:
            self.result = on.execute(plan).wait

    StepDriver(
        Submitted, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=BUDGET, depth=depth
    ).run(generations)
    return generations


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("params", [[GREEDY] * len(SAMPLED), SAMPLED], ids=["greedy", "any"])
def test_tokens_are_those_of_the_cpu(
    padded: bool, params: list[SamplingParams], make_worker: Callable[..., Worker]
) -> None:
    calls = Calls()
    generations = generate(make_runner(calls, padded=padded), params, depth=2)
    expected = generate(make_worker(), params, depth=1)
    assert [generation.output for generation in generations] == [generation.output for generation in expected]
    if padded:
        used = {type(shape): shape for shape in calls.used}
        assert used.keys() == {StepShape, SampleShape}
        assert len({shape.num_outputs is None for shape in calls.used if isinstance(shape, StepShape)}) == 2
    else:
        assert not calls.used


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_bind_their_rows(temperature: float) -> None:
    """With graphs, whose buffers the masks go into, and without: the first of five requests and the last are bound,
    then none is."""
    sampling = SamplingParams(temperature=temperature, seed=3)
    plan = rehearsal_plan(5, 4, 1, BLOCK_SIZE, sampling)
    bits = np.zeros((2, -(-model_config(cached_tiny_model("llama")).architecture.vocab_size // 32)), np.int32)
    bits[0, 3], bits[1, 0] = 1 << 5, 1 << 7
    bound = replace(plan, masks=TokenMasks(np.array([0, 4], np.int32), bits))
    for padded in (False, True):
        calls = Calls()
        runner = make_runner(calls, padded=padded)
        free, masked, again = (runner.execute(each).wait().token_ids[:, 0].tolist() for each in (plan, bound, plan))
        assert masked == [3 * 32 + 5, *free[1:4], 7]
        assert again == free
        for masks, tokens in ((bound.masks, masked), (None, free)):
            late = runner.launch(replace(plan, masks_follow=True)).choose(masks)
            assert late.wait().token_ids[:, 0].tolist() == tokens
        features = {key.features for key in calls.used if isinstance(key, SampleShape)}
        assert any(each & columns.MASK for each in features) == padded
