"""The worker on a CUDA device: the tokens of the CPU, graphs on and off, steps ahead, no waiting, memory."""

import time
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np
import pytest
import torch
import triton

from tests.support.device_waits import refuse_synchronization
from tests.support.generations import NUM_OUTPUT, SAMPLED, prompts
from tests.support.model_loading import model_config
from tests.support.step_driver import GREEDY, Generation, StepDriver
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.errors import StartupError
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.memory import GIB
from tokenmill_engine.worker.rehearsal import rehearsal_plan
from tokenmill_engine.worker.shapes import MAX_GRAPH_TOKENS
from tokenmill_engine.worker.step_ring import NUM_ENTRIES
from tokenmill_engine.worker.worker import Worker

pytestmark = pytest.mark.gpu

NUM_BLOCKS, BLOCK_SIZE, NUM_SLOTS = 192, 16, 12
BUDGET = 2304
"""More than the largest graph holds."""


def engine_config(kind: str, *, enforce_eager: bool = False, cache: CacheConfig | None = None) -> EngineConfig:
    return EngineConfig(
        model=model_config(cached_tiny_model("llama")),
        cache=cache or CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=BUDGET),
        device=DeviceConfig(kind="cuda" if kind == "cuda" else "cpu", enforce_eager=enforce_eager),
    )


@cache
def worker(kind: str, enforce_eager: bool = False) -> Worker:
    made = Worker(engine_config(kind, enforce_eager=enforce_eager))
    made.initialize()
    return made


def generate(
    on: Worker, params: list[SamplingParams], *, budget: int = 512, depth: int = 1, preempt_every: int = 0
) -> list[Generation]:
    generations = [Generation(prompt, NUM_OUTPUT, p) for prompt, p in zip(prompts(), params, strict=True)]
    driver = StepDriver.of_worker(
        on, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=budget, depth=depth
    )
    driver.run(generations, preempt_every=preempt_every)
    return generations


CAPTURED = [
    msgspec.structs.replace(p, bad_words_token_ids=(), min_tokens=0, allowed_token_ids=None, logprobs=None)
    for p in SAMPLED
]
"""Random, filtered and penalized: what graphs can sample."""
PARAMS = {"greedy": [GREEDY] * len(SAMPLED), "captured": CAPTURED, "any": SAMPLED}


@cache
def cpu_tokens(kind: str) -> list[list[int]]:
    return [generation.output for generation in generate(worker("cpu"), PARAMS[kind])]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(("budget", "depth", "preempt_every"), [(512, 1, 0), (512, 2, 0), (19, 3, 0), (64, 1, 4)])
def test_tokens_equal_the_cpu_in_float32(
    enforce_eager: bool, budget: int, depth: int, preempt_every: int, kind: str
) -> None:
    on = worker("cuda", enforce_eager)
    on_cuda = generate(on, PARAMS[kind], budget=budget, depth=depth, preempt_every=preempt_every)
    assert [generation.output for generation in on_cuda] == cpu_tokens(kind)


def test_more_steps_in_flight_than_buffers() -> None:
    ahead = generate(worker("cuda"), CAPTURED, budget=64, depth=2 * NUM_ENTRIES)
    assert [generation.output for generation in ahead] == cpu_tokens("captured")


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_steps_too_large_for_a_graph(enforce_eager: bool) -> None:
    tokens = {}
    for on in (worker("cpu"), worker("cuda", enforce_eager)):
        rng = np.random.default_rng(2)
        generations = [Generation(rng.integers(3, 500, 170 + k).tolist(), 8, p) for k, p in enumerate(SAMPLED)]
        driver = StepDriver.of_worker(
            on, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=BUDGET, depth=2
        )
        driver.run(generations)
        assert driver.plans[0].num_tokens > MAX_GRAPH_TOKENS
        tokens[on] = [generation.output for generation in generations]
    assert len({str(outputs) for outputs in tokens.values()}) == 1


@pytest.mark.parametrize("budget", [512, 16])
def test_logprobs_equal_the_cpu(budget: int) -> None:
    params = [SamplingParams(temperature=0.0, seed=0, logprobs=3, prompt_logprobs=k % 4) for k in range(len(SAMPLED))]
    for ours, theirs in zip(
        generate(worker("cuda"), params, budget=budget, depth=2), generate(worker("cpu"), params), strict=True
    ):
        for field in ("logprobs", "prompt_logprobs"):
            mine, reference = getattr(ours, field), getattr(theirs, field)
            if not reference:
                assert not mine
                continue
            for attribute in ("token_ids", "logprobs", "ranks"):
                a, b = (np.concatenate([getattr(rows, attribute) for rows in pieces]) for pieces in (mine, reference))
                np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("params", [GREEDY, *SAMPLED], ids=range(1 + len(SAMPLED)))
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_no_step_waits_for_the_device(params: SamplingParams, enforce_eager: bool) -> None:
    on = worker("cuda", enforce_eager)

    class Waiting:
        def __init__(self, plan: StepPlan) -> None:
            with refuse_synchronization():
                self.result = on.execute(plan).wait

    generations = [Generation(prompt, 8, params) for prompt in prompts()]
    StepDriver(Waiting, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=64, depth=2).run(
        generations
    )
    assert all(len(generation.output) == 8 for generation in generations)


@pytest.mark.parametrize("params", [GREEDY, CAPTURED[4]], ids=["greedy", "penalized"])
def test_steady_steps_pin_no_memory(params: SamplingParams) -> None:
    generate(worker("cuda"), [params] * len(SAMPLED), budget=64, depth=2)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    generate(worker("cuda"), [params] * len(SAMPLED), budget=64, depth=2)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_no_request_waits_for_a_kernel_that_is_compiled(enforce_eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model in float32; `tests/engine_core/worker/test_rehearsal.py` has the products of bfloat16."""
    on = worker("cuda", enforce_eager)
    compiled: list[str] = []

    def listen(*, src: triton.compiler.ASTSource, **_: object) -> None:
        compiled.append(src.name)

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    params = [
        *SAMPLED,
        *(SamplingParams(temperature=0.0, seed=0, logprobs=2, prompt_logprobs=k % 3) for k in range(12)),
    ]
    for budget in (512, 19):
        for some in (params[:12], params[12:], CAPTURED, [GREEDY] * 12):
            generate(on, some, budget=budget, depth=2)
    assert compiled == []


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_steps_know_how_long_they_took(enforce_eager: bool) -> None:
    on = worker("cuda", enforce_eager)
    started = time.perf_counter()
    results = [on.execute(rehearsal_plan(4, 64, 1, BLOCK_SIZE, GREEDY)) for _ in range(5)]
    elapsed = [result.wait().elapsed_s for result in results]
    assert all(seconds > 0 for seconds in elapsed)
    assert sum(elapsed) <= time.perf_counter() - started


def test_prompts_are_timed_at_the_start() -> None:
    capacity = Worker(engine_config("cuda")).initialize()
    assert [tokens for tokens, _ in capacity.prefill_costs] == [256, 512, 1024, 2048, BUDGET]
    assert all(0 < seconds < 1 for _, seconds in capacity.prefill_costs)


def test_the_share_of_memory_is_used_and_not_exceeded() -> None:
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    share = 0.5
    config = engine_config("cuda", cache=CacheConfig(block_size=BLOCK_SIZE, gpu_memory_utilization=share))
    made = Worker(config)
    capacity = made.initialize()
    taken = free_before - torch.cuda.mem_get_info()[0]
    assert 0.97 * share * total - GIB < taken < share * total
    assert capacity.num_blocks * capacity.groups[0].block_bytes(BLOCK_SIZE) == capacity.kv_cache_bytes
    assert capacity.max_model_len == config.model.max_model_len
    made.close()
    del made
    torch.cuda.empty_cache()


def test_a_device_that_is_not_free_enough_is_refused() -> None:
    free, total = torch.cuda.mem_get_info()
    ballast = torch.empty(int(free - 0.3 * total), dtype=torch.uint8, device="cuda")
    with pytest.raises(StartupError, match=r"less than .* of --gpu-memory-utilization 0\.9"):
        Worker(engine_config("cuda", cache=CacheConfig(gpu_memory_utilization=0.9))).initialize()
    del ballast
    torch.cuda.empty_cache()


def test_a_step_that_cannot_be_enqueued_fails_alone() -> None:
    executor = UniprocExecutor(engine_config("cuda"))
    executor.initialize()
    driver = StepDriver(executor.submit, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, depth=2)
    generations = [Generation(prompt, NUM_OUTPUT) for prompt in prompts()]
    driver.run(generations)
    too_large = replace(driver.plans[0], num_scheduled=np.full(driver.plans[0].num_reqs, 10_000, np.int32))
    handle = executor.submit(too_large)
    with pytest.raises(Exception, match="step 0 failed"):
        handle.result()
    again = [Generation(prompt, NUM_OUTPUT) for prompt in prompts()]
    driver.run(again)
    executor.shutdown()
    expected = cpu_tokens("greedy")
    assert [generation.output for generation in generations] == expected
    assert [generation.output for generation in again] == expected
