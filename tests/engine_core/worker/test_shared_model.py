"""Generation by workers that have a model between them: what one worker with the whole model generates."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, tiny_engine_config
from tests.support.generations import NUM_OUTPUT, SAMPLED, prompts
from tests.support.step_driver import Generation, StepDriver
from tests.support.thread_workers import ThreadWorkers
from tests.support.tiny_models import cached_tiny_model, make_tiny_model, tiny_config, tiny_weights
from tokenmill_engine.config.engine import CacheConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import LogprobRows
from tokenmill_engine.worker.worker import Worker

SHAPE = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 96, "vocab_size": 511}
SIZES = [2, 4]
"""With a key-value head on each of two workers, and one on two workers each."""


def shared(size: int, folder: Path | None = None, cache: CacheConfig | None = None) -> ThreadWorkers:
    config = tiny_engine_config(folder=folder or cached_tiny_model("llama", **SHAPE), cache=cache)
    return ThreadWorkers([replace(config, parallel=ParallelConfig(tensor_parallel_size=size, executor="mp"))] * size)


def drive(workers: ThreadWorkers, budget: int, depth: int) -> StepDriver:
    return StepDriver(
        workers.submit,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_slots=NUM_SLOTS,
        budget=budget,
        depth=depth,
    )


def alone(generations: list[Generation], folder: Path | None = None) -> None:
    """The same by one worker with the whole model."""
    worker = Worker(tiny_engine_config(folder=folder or cached_tiny_model("llama", **SHAPE)))
    worker.initialize()
    StepDriver.of_worker(worker, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS).run(generations)


def check_same_scores(ours: list[LogprobRows], expected: list[LogprobRows]) -> None:
    """Of the same positions, in pieces that may be cut otherwise."""
    assert bool(ours) == bool(expected)
    if not ours:
        return
    for name in ("token_ids", "ranks"):
        np.testing.assert_array_equal(
            *(np.concatenate([getattr(p, name) for p in pieces]) for pieces in (ours, expected))
        )
    values = [np.concatenate([piece.logprobs for piece in pieces]) for pieces in (ours, expected)]
    np.testing.assert_allclose(*values, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("budget", "depth", "preempt_every"), [(512, 2, 0), (16, 1, 0), (33, 3, 0), (40, 1, 4)])
def test_greedy_tokens_are_those_of_one_worker(size: int, budget: int, depth: int, preempt_every: int) -> None:
    ours, expected = ([Generation(prompt, NUM_OUTPUT) for prompt in prompts()] for _ in range(2))
    alone(expected)
    drive(shared(size), budget, depth).run(ours, preempt_every=preempt_every)
    assert [generation.output for generation in ours] == [generation.output for generation in expected]


@pytest.mark.parametrize("size", SIZES)
def test_sampled_tokens_and_logprobs_are_those_of_one_worker(size: int) -> None:
    ours, expected = (
        [Generation(prompt, NUM_OUTPUT, params) for prompt, params in zip(prompts(), SAMPLED, strict=True)]
        for _ in range(2)
    )
    alone(expected)
    drive(shared(size), 40, 2).run(ours)
    assert [generation.output for generation in ours] == [generation.output for generation in expected]
    assert any(generation.logprobs for generation in ours)
    for mine, other in zip(ours, expected, strict=True):
        check_same_scores(mine.logprobs, other.logprobs)


@pytest.mark.parametrize("budget", [512, 7])
def test_logprobs_of_prompts_are_those_of_one_worker(budget: int) -> None:
    params = [SamplingParams(temperature=0.0, seed=0, prompt_logprobs=k, logprobs=1) for k in (0, 2, 5)]
    ours, expected = ([Generation(p, 2, params[i % 3]) for i, p in enumerate(prompts())] for _ in range(2))
    alone(expected)
    drive(shared(2), budget, 1).run(ours)
    assert sum(bool(generation.prompt_logprobs) for generation in ours) == len(prompts()) - 1
    for mine, other in zip(ours, expected, strict=True):
        check_same_scores(mine.prompt_logprobs, other.prompt_logprobs)
        check_same_scores(mine.logprobs, other.logprobs)


@pytest.mark.parametrize("poisoned_id", [11, 300, 510])
def test_logits_that_are_not_numbers_fail_their_request_alone(tmp_path: Path, poisoned_id: int) -> None:
    """Whichever worker has the row; all of them report the same."""
    folder = make_tiny_model(tmp_path, "llama", **SHAPE)
    weights = tiny_weights(tiny_config("llama", **SHAPE))
    weights["model.embed_tokens.weight"][poisoned_id] = float("nan")
    save_file(weights, folder / "model.safetensors")
    sampled = SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=2)
    expected = [Generation(prompt, 5) for prompt in prompts()[:6] if poisoned_id not in prompt]
    alone(expected, folder)
    assert all(generation.error is None for generation in expected)
    ours = [Generation(generation.prompt, 5) for generation in expected]
    failing = [Generation([5, poisoned_id, 6], 5), Generation([poisoned_id] * 20, 5, sampled)]
    drive(shared(2, folder), 64, 2).run([ours[0], failing[0], *ours[1:], failing[1]])
    assert [generation.output for generation in ours] == [generation.output for generation in expected]
    for generation in failing:
        assert "probabilities" in (generation.error or "")
        assert generation.output == []


def test_all_workers_have_as_many_blocks_as_the_one_with_the_fewest() -> None:
    config = tiny_engine_config(folder=cached_tiny_model("llama", **SHAPE))
    configs = [replace(config, cache=CacheConfig(block_size=16, num_gpu_blocks_override=n)) for n in (64, 20)]
    capacities = ThreadWorkers(configs).capacities
    assert [(capacity.num_blocks, capacity.max_model_len) for capacity in capacities] == [(20, 320)] * 2


def test_bytes_are_those_of_one_worker_and_hold_twice_as_much(caplog: pytest.LogCaptureFixture) -> None:
    cache = CacheConfig(block_size=16, kv_cache_memory_bytes=1 << 20)
    with caplog.at_level(logging.INFO):
        two = shared(2, cache=cache).capacities[0]
    whole = Worker(tiny_engine_config(folder=cached_tiny_model("llama", **SHAPE), cache=cache)).initialize()
    assert two.num_blocks // 2 == whole.num_blocks
    assert two.kv_cache_bytes == two.num_blocks * two.groups[0].block_bytes(16) <= 1 << 20
    assert "0.00 GiB per worker" in caplog.text


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    """Whatever the others say who waited for it."""
    configs = [tiny_engine_config(folder=cached_tiny_model("llama", **SHAPE)) for _ in range(2)]
    tiny = replace(configs[1], cache=CacheConfig(block_size=16, kv_cache_memory_bytes=5))
    with pytest.raises(StartupError, match="hold no block"):
        ThreadWorkers([configs[0], tiny])
    folder = make_tiny_model(tmp_path / "model", "llama", **SHAPE)
    broken = tiny_engine_config(folder=folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ConfigError, match="truncated"):
        ThreadWorkers([configs[0], broken])


def test_the_start_is_the_same_on_every_worker() -> None:
    """One agreement, then steps that warm up; the same calls in the same order."""
    workers = shared(2)
    first, second = (group.calls for group in workers.groups)
    assert first == second
    assert first.count("agree_min") == 1
    assert first[0] == "agree_min"
    assert len(first) > 1
