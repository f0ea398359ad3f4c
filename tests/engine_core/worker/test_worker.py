"""Starting a worker: what it offers, what it logs, what it refuses."""

import logging

import pytest

from tests.engine_core.worker.conftest import tiny_engine_config
from tokenmill_engine.config.engine import CacheConfig
from tokenmill_engine.errors import StartupError
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan
from tokenmill_engine.worker.worker import Worker


def test_capacity_describes_the_pool() -> None:
    capacity = Worker(tiny_engine_config()).initialize()
    assert (capacity.num_blocks, capacity.block_size) == (64, 16)
    assert capacity.max_model_len == 512
    assert capacity.kv_cache_bytes == 64 * sum(spec.block_bytes(16) for spec in capacity.groups[0].specs)
    assert len(capacity.groups[0].layers) == 3
    assert capacity.attention_backend in ("native", "torch")
    assert {"load", "profile", "warmup"} <= capacity.phases.keys()
    assert all(seconds >= 0 for seconds in capacity.phases.values())


def test_start_log_says_how_much_fits(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Worker(tiny_engine_config()).initialize()
    assert "KV cache: 1024 tokens in 64 blocks" in caplog.text
    assert "maximum concurrency for 512 tokens per request: 2.00x" in caplog.text
    assert "attention backend: " in caplog.text


def test_a_small_pool_lowers_the_length() -> None:
    config = tiny_engine_config(cache=CacheConfig(block_size=16, num_gpu_blocks_override=8))
    assert Worker(config).initialize().max_model_len == 128


def test_a_small_pool_contradicts_an_explicit_length() -> None:
    config = tiny_engine_config(
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=8), max_model_len_explicit=True
    )
    with pytest.raises(StartupError, match="the largest --max-model-len that fits is 128"):
        Worker(config).initialize()


def test_plans_before_the_start_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not initialized"):
        Worker(tiny_engine_config()).execute(rehearsal_plan(1, 1, 1, 16, GREEDY))
