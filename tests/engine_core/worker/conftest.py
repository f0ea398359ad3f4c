"""Workers over a tiny random model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_loading import model_config
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.worker.worker import Worker

NUM_BLOCKS = 64
BLOCK_SIZE = 16
NUM_SLOTS = 8


def tiny_engine_config(
    *,
    folder: Path | None = None,
    cache: CacheConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    **model_changes: Any,
) -> EngineConfig:
    """A float32 Llama of three layers on the CPU, or the model in `folder`."""
    return EngineConfig(
        model=replace(model_config(folder or cached_tiny_model("llama")), **model_changes),
        cache=cache or CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS),
        scheduler=scheduler or SchedulerConfig(max_num_seqs=NUM_SLOTS, max_num_batched_tokens=512),
        device=DeviceConfig(kind="cpu", num_threads=1),
    )


@pytest.fixture
def make_worker() -> Callable[..., Worker]:
    """Builds initialized workers; arguments as for `tiny_engine_config`."""

    def make(**changes: Any) -> Worker:
        worker = Worker(tiny_engine_config(**changes))
        worker.initialize()
        return worker

    return make
