"""Builds a model and fills it: from safetensors, from GGUF, or with random numbers.

Every checkpoint tensor goes straight to its final place on the device, in runs, by several threads.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.mapping import Destination, match_gguf, match_safetensors
from tokenmill_engine.models.registry import model_class
from tokenmill_engine.models.weights import GGUFSource, SafetensorsSource, WeightSource
from tokenmill_engine.progress import log_progress_bar

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
_CPU_RUN_ELEMENTS = 1 << 18
"""Small enough that dequantization stays in the second-level cache."""
_CUDA_RUN_ELEMENTS = 1 << 23
"""Large enough that copies reach the bus's speed."""


def load_model(config: ModelConfig, device: torch.device, allow_fused: bool = True) -> DenseDecoder:
    """The model of `config`, loaded on `device`, ready for `forward`. `allow_fused` is passed to `finalize`.

    Raises ConfigError if a file is broken or its tensors are not those of the architecture.
    """
    started = time.monotonic()
    model = model_class(config.architecture.name)(config, device)
    load_weights(model, config)
    loaded = time.monotonic()
    model.finalize(allow_fused)
    logger.info(
        "loaded %s (%s, %.0f M parameters, %s on %s, layers run %s): %.2f s, packing %.2f s",
        config.name,
        config.architecture.name,
        config.architecture.num_parameters / 1e6,
        config.dtype,
        device,
        "as one call" if model.is_fused else "one by one",
        loaded - started,
        time.monotonic() - loaded,
    )
    return model


def load_weights(model: DenseDecoder, config: ModelConfig) -> None:
    """Fills every parameter of a new model. Raises ConfigError as `load_model`."""
    with _pool() as pool:
        if config.load_format == "dummy":
            _fill_randomly(pool, model.targets(), config.seed)
            return
        with closing(_open_source(config)) as source:
            match = match_gguf if config.load_format == "gguf" else match_safetensors
            _run_copies(pool, match(model, source.shapes, config.path), source, model.device)


def _open_source(config: ModelConfig) -> WeightSource:
    path = Path(config.path)
    return GGUFSource(path) if config.load_format == "gguf" else SafetensorsSource(path)


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    """Threads that each run torch operators alone: parallel work is divided among them already."""
    num_threads = torch.get_num_threads()
    workers = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(workers, "load", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(num_threads)


def _run_copies(
    pool: ThreadPoolExecutor, destinations: Sequence[Destination], source: WeightSource, device: torch.device
) -> None:
    """Fills every destination. The first error cancels what has not begun."""
    run_elements = _CUDA_RUN_ELEMENTS if device.type == "cuda" else _CPU_RUN_ELEMENTS
    runs = [run for destination in destinations for run in _runs(destination, source, run_elements)]
    total = sum(destination.target.nbytes for destination in destinations)
    futures = {pool.submit(copy): nbytes for copy, nbytes in runs}
    try:
        with log_progress_bar(logger, total=total, desc="loading weights", unit="B", unit_scale=True) as bar:
            for future in as_completed(futures):
                future.result()
                bar.update(futures[future])
    finally:
        for future in futures:
            future.cancel()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _runs(
    destination: Destination, source: WeightSource, run_elements: int
) -> Iterator[tuple[Callable[[], None], int]]:
    """Copies that together fill one destination, each with the number of bytes it writes."""
    target = destination.target
    slab = target.numel() // target.shape[0]
    step = max(1, run_elements // slab)
    for first in range(0, target.shape[0], step):
        part = target[first : first + step]
        yield partial(_copy_run, source, destination.name, first * slab, part), part.nbytes


def _copy_run(source: WeightSource, name: str, first: int, part: torch.Tensor) -> None:
    values = source.read(name, first, part.numel(), pinned=part.is_cuda)
    if part.is_cuda:
        values = values.to(part.device, non_blocking=True)
    part.copy_(values.view(part.shape))


def _fill_randomly(pool: ThreadPoolExecutor, targets: Mapping[str, torch.Tensor], seed: int) -> None:
    """Weights that keep activations near unit size, the same for the same seed and kind of device."""
    fillings = [
        pool.submit(_fill_tensor, name, target, seed * len(targets) + index)
        for index, (name, target) in enumerate(targets.items())
    ]
    for filling in fillings:
        filling.result()


def _fill_tensor(name: str, target: torch.Tensor, seed: int) -> None:
    if name.endswith("norm.weight"):
        target.fill_(1.0)
        return
    bound = target.shape[-1] ** -0.5
    target.uniform_(-bound, bound, generator=torch.Generator(target.device).manual_seed(seed))
