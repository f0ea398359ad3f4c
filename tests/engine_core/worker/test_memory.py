"""Sizes of the KV cache and what is said when they do not work out."""

import re
from dataclasses import replace

import pytest
import torch

from tests.engine_core.worker.conftest import tiny_engine_config
from tokenmill_engine.config.engine import CacheConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.errors import StartupError
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.worker import memory
from tokenmill_engine.worker.memory import GIB, DeviceMemory, MeasuredUse

GROUPS = group_layers([KVSpec("full", 2, 16, "float32")] * 3)
BLOCK_BYTES = GROUPS[0].block_bytes(16)
CARD = DeviceMemory(free=75 * GIB, total=80 * GIB)


def test_cuda_gets_the_share_less_what_was_measured() -> None:
    use = MeasuredUse(weights=16 * GIB, peak=2 * GIB, graphs=GIB)
    assert memory.cuda_kv_bytes(CARD, use, CacheConfig(gpu_memory_utilization=0.9), BLOCK_BYTES) == 53 * GIB


def test_cuda_without_room_names_a_share_that_works() -> None:
    use = MeasuredUse(weights=16 * GIB, peak=2 * GIB, graphs=GIB)
    with pytest.raises(StartupError) as failure:
        memory.cuda_kv_bytes(CARD, use, CacheConfig(gpu_memory_utilization=0.2), BLOCK_BYTES)
    message = str(failure.value)
    assert "\n" not in message
    assert all(number in message for number in ("0.2", "80.00 GiB", "16.00 GiB", "2.00 GiB", "1.00 GiB"))
    share = re.search(r"pass --gpu-memory-utilization (\S+) or more", message)
    assert share is not None
    assert memory.cuda_kv_bytes(CARD, use, CacheConfig(gpu_memory_utilization=float(share[1])), BLOCK_BYTES) > 0


def test_cuda_too_small_for_the_model_says_so() -> None:
    use = MeasuredUse(weights=79 * GIB, peak=2 * GIB, graphs=0)
    with pytest.raises(StartupError, match="does not fit this device"):
        memory.cuda_kv_bytes(CARD, use, CacheConfig(), BLOCK_BYTES)


def test_a_device_in_use_is_refused_before_loading() -> None:
    busy = DeviceMemory(free=40 * GIB, total=80 * GIB)
    with pytest.raises(StartupError, match=r"40\.00 GiB of 80\.00 GiB.*pass --gpu-memory-utilization 0\.5$"):
        memory.check_free_share(busy, CacheConfig(gpu_memory_utilization=0.9))
    memory.check_free_share(busy, CacheConfig(gpu_memory_utilization=0.5))


def test_cpu_takes_what_is_stated_first_blocks_then_bytes() -> None:
    config = tiny_engine_config(cache=CacheConfig(num_gpu_blocks_override=7, kv_cache_memory_bytes=GIB))
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == 7 * BLOCK_BYTES
    config = tiny_engine_config(cache=CacheConfig(kv_cache_memory_bytes=123_456_789))
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == 123_456_789


def test_cpu_default_is_a_bounded_share_for_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_engine_config(cache=CacheConfig())
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 8 * GIB)
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == 2 * GIB
    assert memory.cpu_kv_bytes(replace(config, data_parallel_size=4, data_parallel_size_local=2), BLOCK_BYTES) == GIB
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 800 * GIB)
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == 4 * GIB


def test_cpu_workers_of_an_engine_have_its_share_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(tensor_parallel_size=4)
    config = replace(tiny_engine_config(cache=CacheConfig()), parallel=parallel)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 8 * GIB)
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == GIB // 2
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 800 * GIB)
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == GIB


def test_cpu_gives_every_worker_what_is_stated_if_the_host_has_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = ParallelConfig(tensor_parallel_size=4)
    config = replace(tiny_engine_config(cache=CacheConfig(kv_cache_memory_bytes=2 * GIB)), parallel=parallel)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 8 * GIB)
    assert memory.cpu_kv_bytes(config, BLOCK_BYTES) == 2 * GIB
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 8 * GIB - 1)
    with pytest.raises(StartupError, match=rf"would take 8\.00 GiB and 7\.99 GiB .*bytes {GIB - 1} or less"):
        memory.cpu_kv_bytes(config, BLOCK_BYTES)


def test_cpu_refuses_more_than_the_host_has() -> None:
    config = tiny_engine_config(cache=CacheConfig(kv_cache_memory_bytes=1 << 50))
    with pytest.raises(StartupError, match=r"1048576\.00 GiB.*--kv-cache-memory-bytes \d+"):
        memory.cpu_kv_bytes(config, BLOCK_BYTES)


def test_less_than_a_block_is_refused() -> None:
    assert memory.blocks_in(5 * BLOCK_BYTES + 1, BLOCK_BYTES) == 5
    with pytest.raises(StartupError, match=f"--kv-cache-memory-bytes {BLOCK_BYTES} or more"):
        memory.blocks_in(BLOCK_BYTES - 1, BLOCK_BYTES)


def test_model_length_is_lowered_unless_it_was_asked_for() -> None:
    model = tiny_engine_config(max_model_len=512).model
    assert memory.fit_model_len(model, 32, 16, GROUPS) == 512
    assert memory.fit_model_len(model, 31, 16, GROUPS) == 31 * 16
    explicit = replace(model, max_model_len_explicit=True)
    assert memory.fit_model_len(explicit, 32, 16, GROUPS) == 512
    with pytest.raises(StartupError) as failure:
        memory.fit_model_len(explicit, 31, 16, GROUPS)
    message = str(failure.value)
    needed, available = (f"{blocks * BLOCK_BYTES / GIB:.3g} GiB" for blocks in (32, 31))
    assert f"--max-model-len 512 needs {needed}" in message
    assert f"{available} are available" in message
    assert message.endswith("the largest --max-model-len that fits is 496")


def test_caches_are_made_for_every_layer() -> None:
    specs = [KVSpec("full", heads, 16, "bfloat16") for heads in (1, 2, 4)]
    caches = memory.allocate_kv_caches(group_layers(specs), 5, 8, torch.bfloat16, torch.device("cpu"))
    assert [keys.shape for keys, _ in caches] == [(5, 8, heads, 16) for heads in (1, 2, 4)]
    assert all(values.dtype == torch.bfloat16 for _, values in caches)


def test_memory_that_cannot_be_had_is_a_start_error() -> None:
    with pytest.raises(StartupError, match="lower --num-gpu-blocks-override"):
        memory.allocate_kv_caches(GROUPS, 1 << 36, 16, torch.float32, torch.device("cpu"))
