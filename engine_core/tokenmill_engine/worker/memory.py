"""How much memory the KV cache gets, and how long a request it can hold."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill_engine.config.device import available_host_bytes
from tokenmill_engine.config.engine import CacheConfig, EngineConfig, ModelConfig
from tokenmill_engine.errors import StartupError
from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.models.dense_decoder import KVCaches
from tokenmill_kernels import ops

logger = logging.getLogger(__name__)

GIB = 1 << 30

_CPU_MAX_BYTES = 4 * GIB
_CPU_SHARE = 0.25
"""Of the memory that is available when the engine starts."""
GRAPH_BYTES = 2 << 20
"""Device memory of one captured graph beside its tensors."""


def gib(num_bytes: float) -> str:
    """`num_bytes` for a message, in GiB; rounded down so that what is short never looks enough."""
    return f"{math.floor(num_bytes / GIB * 100) / 100:.2f} GiB"


@dataclass(slots=True, frozen=True)
class DeviceMemory:
    """Of one CUDA device, in bytes."""

    free: int
    total: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        free, total = torch.cuda.mem_get_info(device)
        return cls(free, total)


@dataclass(slots=True, frozen=True)
class MeasuredUse:
    """Device memory that is not for the KV cache, in bytes."""

    weights: int
    """The model and the slot tables."""
    peak: int
    """What the largest step needs on top of them."""
    graphs: int
    images: int = 0
    """What the encoder made of images, kept between steps."""

    @property
    def total(self) -> int:
        return self.weights + self.peak + self.graphs + self.images


def explicit_bytes(cache: CacheConfig, block_bytes: int) -> int | None:
    """KV bytes that the configuration states outright, or None."""
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override * block_bytes
    return cache.kv_cache_memory_bytes


def check_free_share(memory: DeviceMemory, cache: CacheConfig) -> None:
    """Before anything is loaded: the share that the KV cache is cut from must be free.

    Raises:
        StartupError: something else uses the device.
    """
    share = cache.gpu_memory_utilization * memory.total
    if memory.free >= share:
        return
    would_work = math.floor(memory.free / memory.total * 100) / 100
    raise StartupError(
        f"{gib(memory.free)} of {gib(memory.total)} device memory are free, less than the {gib(share)} of "
        f"--gpu-memory-utilization {cache.gpu_memory_utilization:g}; free the device or pass "
        f"--gpu-memory-utilization {would_work:g}"
    )


def cuda_kv_bytes(memory: DeviceMemory, use: MeasuredUse, cache: CacheConfig, block_bytes: int) -> int:
    """What the share of device memory leaves for the KV cache.

    Raises:
        StartupError: less than one block.
    """
    left = int(cache.gpu_memory_utilization * memory.total) - use.total
    if left >= block_bytes:
        return left
    needed = math.ceil((use.total + block_bytes) / memory.total * 100) / 100
    lower = "lower --max-num-batched-tokens or --max-num-seqs"
    if needed < 1:
        remedy = f"pass --gpu-memory-utilization {needed:g} or more, or {lower}"
    else:
        remedy = f"the model does not fit this device: {lower}, or use a smaller model"
    raise StartupError(
        f"no memory is left for the KV cache: --gpu-memory-utilization {cache.gpu_memory_utilization:g} of "
        f"{gib(memory.total)} is {gib(cache.gpu_memory_utilization * memory.total)}, the weights take "
        f"{gib(use.weights)}, the largest step {gib(use.peak)}, CUDA graphs {gib(use.graphs)}"
        f"{f', encoded images {gib(use.images)}' if use.images else ''}; {remedy}"
    )


def cpu_kv_bytes(config: EngineConfig, block_bytes: int) -> int:
    """On a CPU, for one worker: what the configuration states, else its part of a quarter of the available host memory,
    shared by the engine cores, and at most 4 GiB each.

    Raises:
        StartupError: more is asked for than the host has.
    """
    available = available_host_bytes()
    stated = explicit_bytes(config.cache, block_bytes)
    num_workers = config.parallel.world_size
    if stated is None:
        return int(min(_CPU_MAX_BYTES, _CPU_SHARE * available / config.data_parallel_size_local)) // num_workers
    needed = stated * num_workers
    if needed > available:
        would_work = available // 2 // num_workers
        raise StartupError(
            f"the KV cache would take {gib(needed)} and {gib(available)} of host memory are available; "
            f"pass --kv-cache-memory-bytes {would_work} or less, or --num-gpu-blocks-override "
            f"{would_work // block_bytes} or less"
        )
    return stated


def blocks_in(num_bytes: int, block_bytes: int) -> int:
    """Blocks that `num_bytes` hold.

    Raises:
        StartupError: not one.
    """
    num_blocks = num_bytes // block_bytes
    if num_blocks < 1:
        raise StartupError(
            f"{num_bytes} bytes of KV cache hold no block of {block_bytes} bytes; "
            f"pass --kv-cache-memory-bytes {block_bytes} or more, or a smaller --block-size"
        )
    return num_blocks


def fit_model_len(model: ModelConfig, num_blocks: int, block_size: int, groups: Sequence[KVGroup]) -> int:
    """Longest request that `num_blocks` hold: `max_model_len`, or less where nobody insisted on it.

    Raises:
        StartupError: `max_model_len` was given explicitly and does not fit.
    """
    fits = num_blocks // len(groups) * block_size
    if fits >= model.max_model_len:
        return model.max_model_len
    block_bytes = max(group.block_bytes(block_size) for group in groups)
    needed = math.ceil(model.max_model_len / block_size) * len(groups) * block_bytes
    if model.max_model_len_explicit or fits == 0:
        raise StartupError(
            f"--max-model-len {model.max_model_len} needs {_exact_gib(needed)} of KV cache, "
            f"{_exact_gib(num_blocks * block_bytes)} are available; the largest --max-model-len that fits is {fits}"
        )
    logger.info("the KV cache holds requests of at most %d tokens; the model would allow %d", fits, model.max_model_len)
    return fits


def _exact_gib(num_bytes: int) -> str:
    """Small caches of test set-ups would all read 0.00 with two digits."""
    return f"{num_bytes / GIB:.3g} GiB"


def allocate_kv_caches(
    groups: Sequence[KVGroup], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCaches:
    """Key and value cache of every layer, in layer order.

    Raises:
        StartupError: the device does not have the memory.
    """
    by_layer = {layer: spec for group in groups for layer, spec in zip(group.layers, group.specs, strict=True)}
    try:
        return [
            ops.allocate_kv_cache(num_blocks, block_size, spec.num_kv_heads, spec.head_dim, dtype, device)
            for _, spec in sorted(by_layer.items())
        ]
    except (RuntimeError, MemoryError, OSError, ValueError) as error:
        needed = num_blocks * sum(group.block_bytes(block_size) for group in groups)
        raise StartupError(
            f"the device cannot give {gib(needed)} for {num_blocks} KV blocks ({str(error).splitlines()[0]}); "
            "lower --num-gpu-blocks-override, --kv-cache-memory-bytes or --gpu-memory-utilization"
        ) from error
