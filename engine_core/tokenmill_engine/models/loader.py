"""Builds a model and fills it: from safetensors, from GGUF, or with random numbers.

Every checkpoint tensor, or as much of it as this worker has, goes straight to its final place on the device, in runs of
elements, by several threads.
"""

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from tokenmill_engine.attention.backend import AttentionBackend
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.stages import Stage
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.layers.placement import Target, cut
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.lanes import Lane
from tokenmill_engine.models.loadable import Loadable
from tokenmill_engine.models.mapping import Destination, match_gguf, match_safetensors
from tokenmill_engine.models.part_source import PartSource
from tokenmill_engine.models.registry import model_class
from tokenmill_engine.models.weights import CheckpointSource, GGUFSource, SafetensorsSource, WeightSource
from tokenmill_engine.progress import log_progress_bar

logger = logging.getLogger(__name__)

_MAX_THREADS = 8
_RUN_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
"""Of a run of elements, in the wider of its two types. CPU: dequantization stays in the second-level cache. CUDA: so
large that threads seldom need Python's lock, which whoever prepares kernels meanwhile has most of the time."""
_NORM_WEIGHT = re.compile(r"(?:[nN]orm[12]?|ln_q)\.weight$")
_SWITCH_INTERVAL_S = 0.0005
"""How long they wait for the lock at most."""


def build_model(
    config: ModelConfig,
    device: torch.device,
    attention: AttentionBackend | None = None,
    group: Group = ALONE,
    stage: Stage | None = None,
) -> DenseDecoder:
    """The model of `config` on `device`, not filled yet, with `attention` or what is built in for the device; this
    worker's part of it if there are others in `group`, and of `stage` if that is not the whole model.

    Raises ConfigError for an unknown architecture.
    """
    return model_class(config.architecture.name)(config, device, attention, group, stage)


def load_model(config: ModelConfig, device: torch.device, allow_fused: bool = True) -> DenseDecoder:
    """The model of `config`, loaded on `device`, ready for `forward`. `allow_fused` is passed to `finalize`.

    Raises ConfigError if a file is broken or its tensors are not those of the architecture.
    """
    model = build_model(config, device)
    with WeightLoading(model, config) as loading:
        loading.finish(allow_fused)
    return model


class WeightLoading:
    """Weights on their way into a new model, in threads of their own. On a GPU they are random numbers until they
    arrive: meanwhile the model can be run and timed, for all but its answers."""

    def __init__(self, model: Loadable, config: ModelConfig) -> None:
        self._model = model
        self._config = config
        self._started = time.monotonic()
        self._cancelled = threading.Event()
        self._done: Future[float] = Future()
        if model.device.type == "cuda" and config.load_format != "dummy":
            for name, target in model.targets().items():
                _fill_tensor(name, target, config.seed)
            torch.cuda.synchronize(model.device)
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def __enter__(self) -> "WeightLoading":
        return self

    def __exit__(self, *exception: object) -> None:
        """What has not arrived is given up."""
        self._cancelled.set()
        self._thread.join()

    def finish(self, allow_fused: bool = True) -> None:
        """Waits for the weights, then finalizes the model with `allow_fused`.

        Raises ConfigError if a file is broken or its tensors are not those of the architecture.
        """
        load_s = self._done.result()
        if self._model.device.type == "cuda":
            _release_page_locked_memory()
        loaded = time.monotonic()
        self._model.finalize(allow_fused)
        logger.info(
            "loaded %s (%s, %.0f M parameters, %s on %s, layers run %s): %.2f s, packing %.2f s",
            self._config.name,
            self._config.architecture.name,
            self._config.num_parameters / 1e6,
            self._config.dtype,
            self._model.device,
            "as one call" if self._model.is_fused else "one by one",
            load_s,
            time.monotonic() - loaded,
        )

    def _run(self) -> None:
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            load_weights(self._model, self._config, self._cancelled)
        except BaseException as error:
            self._done.set_exception(error)
        else:
            self._done.set_result(time.monotonic() - self._started)
        finally:
            sys.setswitchinterval(interval_s)


def _release_page_locked_memory() -> None:
    """Gives the buffers of the lanes, which are gone, back to the system; torch would keep them for the next who asks
    for as large ones. Some versions have the function under its internal name only."""
    release = getattr(torch.accelerator, "empty_host_cache", None) or getattr(torch._C, "_host_emptyCache", None)
    if release is not None:
        release()


def load_weights(model: Loadable, config: ModelConfig, cancelled: threading.Event | None = None) -> None:
    """Fills every parameter of a new model; gives up with CancelledError once `cancelled` is set. Raises ConfigError
    as `load_model`."""
    cancelled = cancelled or threading.Event()
    if config.load_format == "dummy":
        _fill_randomly(model.targets(), model.parameter_names(), config.seed, cancelled)
        return
    with closing(_open_source(config)) as source:
        match = match_gguf if config.load_format == "gguf" else match_safetensors
        destinations = match(model, source.shapes, config.path)
        parts = {destination.key: (destination.name, destination.part) for destination in destinations}
        _run_copies(destinations, PartSource(source, parts), model.device, cancelled)


def _open_source(config: ModelConfig) -> CheckpointSource:
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


def _completed(futures: Iterable[Future[None]], cancelled: threading.Event) -> Iterator[Future[None]]:
    """Each of `futures` when it is done. The first error, or CancelledError once `cancelled` is set, is raised and
    cancels what has not begun."""
    try:
        for future in as_completed(futures):
            future.result()
            if cancelled.is_set():
                raise CancelledError
            yield future
    finally:
        for future in futures:
            future.cancel()


def _run_copies(
    destinations: Sequence[Destination], source: WeightSource, device: torch.device, cancelled: threading.Event
) -> None:
    """Fills every destination."""
    run_bytes = _RUN_BYTES[device.type]
    runs = [run for destination in destinations for run in _runs(destination, source, run_bytes)]
    total = sum(destination.target.nbytes for destination in destinations)
    lanes: list[Lane] = []
    of_thread = threading.local()

    def run_in_lane(copy: Callable[[Lane], None]) -> None:
        lane: Lane | None = getattr(of_thread, "lane", None)
        if lane is None:
            lane = of_thread.lane = Lane(device, run_bytes)
            lanes.append(lane)
        copy(lane)

    with _pool() as pool:
        futures = {pool.submit(run_in_lane, copy): num_bytes for copy, num_bytes in runs}
        with log_progress_bar(logger, total=total, desc="loading weights", unit="B", unit_scale=True) as bar:
            for future in _completed(futures, cancelled):
                bar.update(futures[future])
    for lane in lanes:
        lane.finish()


def _runs(
    destination: Destination, source: WeightSource, run_bytes: int
) -> Iterator[tuple[Callable[[Lane], None], int]]:
    """Copies that together fill one destination, each with the number of bytes it writes."""
    target = destination.target
    slab = target.numel() // target.shape[0]
    item_bytes = max(source.dtype(destination.key).itemsize, target.itemsize)
    step = max(1, run_bytes // (slab * item_bytes))
    for first in range(0, target.shape[0], step):
        part = target[first : first + step]
        yield partial(Lane.copy, source=source, name=destination.key, first=first * slab, part=part), part.nbytes


def _fill_randomly(targets: Mapping[str, Target], names: Sequence[str], seed: int, cancelled: threading.Event) -> None:
    """Weights that keep activations near unit size, the same for the same seed and kind of device, however many workers
    there are. `names` are those of the whole model."""
    with _pool() as pool:
        fillings = [
            pool.submit(_fill_tensor, name, targets[name], seed * len(names) + index)
            for index, name in enumerate(names)
            if name in targets
        ]
        for _ in _completed(fillings, cancelled):
            pass


def _fill_tensor(name: str, target: Target, seed: int) -> None:
    view = target.view
    if _NORM_WEIGHT.search(name):
        view.fill_(1.0)
        return
    bound = target.shape[-1] ** -0.5
    values = view if target.shape == view.shape else view.new_empty(target.shape)
    values.uniform_(-bound, bound, generator=torch.Generator(view.device).manual_seed(seed))
    if values is not view:
        for single in target.single():
            single.view.copy_(cut(values, single.part))
