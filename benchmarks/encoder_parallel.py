"""The vision encoder on several workers, in parts (`weights`) or whole on each (`data`): `python -m
benchmarks.encoder_parallel`, from the root.

Two figures for each number of workers and set of images that come at once. *encoder*: from when all workers begin a
step's images to when the last one has its rows, median, of a process per worker with the encoder alone. *TTFT*: from
when a request with the images reaches an engine core with the whole model to its first token; *burst*, its mean when
every image comes in a request of its own, all at once. Weights are random, of the shape of Qwen2.5-VL-7B; images are as
the API server sends them, so its work is not in these figures. `--setting cpu` has a shape that a CPU computes in no
time, and shows that all of it works.
"""

import argparse
import dataclasses
import hashlib
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.media_shapes import model_config
from tokenmill_engine.config.engine import (
    CacheConfig,
    DeviceConfig,
    DeviceKind,
    DtypeName,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from tokenmill_engine.config.hf_folder import parse_architecture
from tokenmill_engine.config.hf_media import parse_media
from tokenmill_engine.config.media import EncoderMode, MediaConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.distributed import nccl_group
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.distributed.torch_group import join
from tokenmill_engine.engine import EngineCore
from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.messages import AddRequest, FinishReason, MediaItem, MediaTensor, SamplingParams, StepOutput
from tokenmill_engine.models.loader import build_model, load_weights
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.outputs import EncoderInput, StepMedia
from tokenmill_engine.worker.encoder import EncoderOutputs
from tokenmill_engine.worker.encoder_shares import EncoderShare

MODES: tuple[EncoderMode, ...] = ("weights", "data")
_TEXT_TOKENS = 16
"""Of a request, in front of its images."""
_HANG_S = 300.0
"""Workers that say nothing for so long are stuck."""

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Setting:
    """A shape, where it runs, and what it looks at."""

    config: Mapping[str, Any]
    device: DeviceKind
    dtype: DtypeName
    sizes: tuple[int, ...]
    images: Mapping[str, tuple[int, ...]]
    """Pixels on a side of each image of a set."""
    max_num_batched_tokens: int
    repeats: int

    def model(self, mode: EncoderMode = "weights") -> ModelConfig:
        architecture = parse_architecture(self.config, "the shape")
        return ModelConfig(
            name="shape",
            path="",
            tokenizer_path="",
            architecture=architecture,
            load_format="dummy",
            dtype=self.dtype,
            seed=0,
            max_model_len=32768,
            max_model_len_explicit=False,
            eos_token_ids=(),
            media=parse_media(self.config, "the shape"),
            encoder_mode=mode,
        )

    def engine(self, mode: EncoderMode, size: int) -> EngineConfig:
        cache = CacheConfig(num_gpu_blocks_override=4096) if self.device == "cpu" else CacheConfig()
        return EngineConfig(
            model=self.model(mode),
            cache=dataclasses.replace(cache, enable_prefix_caching=False),
            scheduler=SchedulerConfig(
                max_num_seqs=64, max_num_batched_tokens=self.max_num_batched_tokens, explicit_budget=True
            ),
            device=DeviceConfig(kind=self.device, num_threads=1),
            parallel=ParallelConfig(size, executor="mp"),
        )


SETTINGS = {
    "gpu": Setting(
        model_config("vl7b"),
        "cuda",
        "bfloat16",
        (2, 4),
        {
            "1 x 448": (448,),
            "1 x 1344": (1344,),
            "4 x 1344": (1344,) * 4,
            "16 x 448": (448,) * 16,
            "8 of 252 to 2044": (252, 336, 448, 616, 840, 1120, 1512, 2044),
        },
        16384,
        10,
    ),
    "cpu": Setting(
        model_config("tiny"),
        "cpu",
        "float32",
        (2,),
        {"1 x 224": (224,), "4 x 224": (224,) * 4, "3 of 84 to 280": (84, 168, 280)},
        4096,
        3,
    ),
}


def grid_of(side: int, media: MediaConfig) -> Grid:
    """Patches of a square image whose side is a whole number of merged ones."""
    count = side // media.vision.patch_size
    if count % media.vision.spatial_merge_size:
        raise ValueError(f"{side} pixels are no whole number of merged patches")
    return (1, count, count)


def tensors_of(grid: Grid, media: MediaConfig, seed: int) -> dict[str, MediaTensor]:
    """An image as the API server sends it."""
    shape = (math.prod(grid), media.vision.image_patch_dim)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    values = np.tile(np.linspace(-1, 1, 256, dtype=np.float32), (media.vision.num_channels, 1))
    return {
        "pixel_values": MediaTensor("uint8", shape, pixels.tobytes()),
        "values": MediaTensor("float32", values.shape, values.tobytes()),
    }


def num_rows(grid: Grid, media: MediaConfig) -> int:
    """Of the encoder's output, and placeholders."""
    return math.prod(grid) // media.vision.spatial_merge_size**2


# --- the encoder alone --------------------------------------------------------------------------------------------


def encode_as(rank: int, size: int, setting: Setting, mode: EncoderMode, folder: str, results: Connection) -> None:
    """A process: sends (set, seconds) for each repetition of each set of images, and None when all are done."""
    host: Group = join(rank, size, Path(folder) / "store") if size > 1 else ALONE
    device, group = torch.device(setting.device), host
    if setting.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        group = nccl_group.connect(host, device, use_peer_memory=True) if size > 1 else ALONE
    else:
        torch.set_num_threads(1)
    config = setting.model(mode)
    # One layer of the decoder, which is not used.
    config = dataclasses.replace(config, architecture=dataclasses.replace(config.architecture, num_layers=1))
    model = build_model(config, device, group=group)
    assert isinstance(model, MediaDecoder)
    assert config.media is not None
    load_weights(model, config)
    model.finalize()
    outputs, next_entry = EncoderOutputs(model, EncoderShare(group, mode)), 0
    for name, sides in setting.images.items():
        grids = [grid_of(side, config.media) for side in sides]
        tensors = [tensors_of(grid, config.media, seed) for seed, grid in enumerate(grids)]
        for turn in range(setting.repeats + 2):
            images = [
                EncoderInput(next_entry + index, "image", num_rows(grid, config.media), grid, tensors[index])
                for index, grid in enumerate(grids)
            ]
            host.agree_min(0)
            began = time.perf_counter()
            with torch.inference_mode():
                outputs.apply(StepMedia([], images, []))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn > 1:
                results.send((name, time.perf_counter() - began))
            outputs.apply(StepMedia([image.entry for image in images], [], []))
            next_entry += len(images)
    host.agree_min(0)
    results.send(None)


def encoder_times(setting: Setting, size: int, mode: EncoderMode) -> dict[str, float]:
    """Seconds for each set of images, median, until the last worker is done.

    Raises:
        SystemExit: a worker failed or is stuck.
    """
    context = multiprocessing.get_context("spawn")
    times: dict[str, list[float]] = {name: [] for name in setting.images}
    with tempfile.TemporaryDirectory() as folder:
        connections, processes = [], []
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=encode_as, args=(rank, size, setting, mode, folder, sending), daemon=True)
            process.start()
            sending.close()
            connections.append(receiving)
            processes.append(process)
        try:
            while (told := [_received(rank, each) for rank, each in enumerate(connections)])[0] is not None:
                ((name, _), *_), seconds = told, [each[1] for each in told if each is not None]
                times[name].append(max(seconds))
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {name: statistics.median(each) for name, each in times.items()}


def _received(rank: int, connection: Connection) -> Any:
    if not connection.poll(_HANG_S):
        raise SystemExit(f"worker {rank} is stuck: nothing for {_HANG_S:g} s")
    try:
        return connection.recv()
    except EOFError:
        raise SystemExit(f"worker {rank} failed") from None


# --- with the whole model -----------------------------------------------------------------------------------------


class Requests:
    """Of one engine core. Every image is new to it."""

    def __init__(self, core: EngineCore, media: MediaConfig) -> None:
        self._core, self._media = core, media
        self._num_requests = self._num_images = 0

    def mean_ttft(self, requests: Sequence[Sequence[int]]) -> float:
        """Seconds to the first token, of requests that come at once; each has images so many pixels on a side."""
        added = [self._message(sides) for sides in requests]
        began = time.perf_counter()
        for message in added:
            self._core.handle(message)
        times = []
        while self._core.has_work:
            for _, output in self._core.step():
                if isinstance(output, StepOutput):
                    now = time.perf_counter() - began
                    if any(finish.reason is FinishReason.ERROR for finish in output.finishes):
                        raise SystemExit(f"a request failed: {output.finishes}")
                    times += [now] * len(output.finishes)
        return statistics.fmean(times)

    def _message(self, sides: Sequence[int]) -> AddRequest:
        tokens, items = [1] * _TEXT_TOKENS, []
        for side in sides:
            grid = grid_of(side, self._media)
            count = num_rows(grid, self._media)
            key = hashlib.sha256(str(self._num_images).encode()).digest()
            tensors = tensors_of(grid, self._media, self._num_images)
            self._num_images += 1
            items.append(MediaItem("image", key, len(tokens), count, grid, tensors))
            tokens += [self._media.image_token_id] * count + [1]
        self._num_requests += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        token_ids = np.array(tokens, "<i4").tobytes()
        return AddRequest(self._num_requests, "", token_ids, sampling, time.monotonic(), media=tuple(items))


def first_tokens(setting: Setting, size: int, mode: EncoderMode) -> dict[str, tuple[float, float]]:
    """For each set of images the seconds to the first token: of one request, and the mean of one for each image."""
    config = setting.engine(mode, size)
    assert config.model.media is not None
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        pool = WorkerPool(size, may_use_gpus=setting.device == "cuda")
        executor = MultiprocExecutor(config, pool, 0, str(Path(folder) / "store"), lambda error: None)
        try:
            requests = Requests(EngineCore(config, executor, executor.initialize()), config.model.media)
            for name, sides in setting.images.items():
                together, apart = [sides], [[side] for side in sides]
                for each in (together, apart):
                    requests.mean_ttft(each)
                results[name] = (
                    statistics.median(requests.mean_ttft(together) for _ in range(setting.repeats)),
                    statistics.median(requests.mean_ttft(apart) for _ in range(setting.repeats)),
                )
        finally:
            executor.shutdown()
    return results


# --- the table ----------------------------------------------------------------------------------------------------


def measure(setting: Setting, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of the table: of one worker, which has all of the encoder, then of each size in both modes."""
    for size in (1, *sizes):
        for mode in MODES if size > 1 else MODES[:1]:
            encoder, tokens = encoder_times(setting, size, mode), first_tokens(setting, size, mode)
            for name in setting.images:
                ttft, burst = tokens[name]
                figures = {"encoder_ms": encoder[name], "ttft_ms": ttft, "burst_ttft_ms": burst}
                yield {
                    "images": name,
                    "workers": size,
                    "mode": mode if size > 1 else "alone",
                    **{key: round(seconds * 1e3, 3) for key, seconds in figures.items()},
                }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each set and number of workers, `data` beside `weights`."""
    by_place = {(row["images"], row["workers"], row["mode"]): row for row in rows}
    lines = [f"{'images':<18}{'workers':>8}  " + "".join(f"{name:>26}" for name in ("encoder ms", "TTFT ms", "burst"))]
    lines.append(" " * 28 + f"{'weights    data  ratio':>26}" * 3)
    for name, size in dict.fromkeys((row["images"], row["workers"]) for row in rows):
        cells = []
        for figure in ("encoder_ms", "ttft_ms", "burst_ttft_ms"):
            if size == 1:
                cells.append(f"{by_place[name, 1, 'alone'][figure]:>26.1f}")
                continue
            weights, data = (by_place.get((name, size, mode), {}).get(figure, math.nan) for mode in MODES)
            cells.append(f"{weights:>11.1f}{data:>8.1f}{data / weights:>7.2f}")
        lines.append(f"{name:<18}{size:>8}  " + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Prints the table; writes rows as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="gpu")
    parser.add_argument("--sizes", type=int, nargs="+", help="workers; default: 2 and 4, as far as there are GPUs")
    parser.add_argument("--output", type=Path, help="write the rows there, as JSON")
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.setting]
    most = torch.cuda.device_count() if setting.device == "cuda" else max(setting.sizes)
    sizes = arguments.sizes or [size for size in setting.sizes if size <= most]
    if max(sizes, default=1) > most and setting.device == "cuda":
        parser.error(f"there are {most} GPUs")
    name = torch.cuda.get_device_name() if setting.device == "cuda" else "CPU"
    print(f"{name}; ratio: data / weights, below 1 where data is quicker")  # noqa: T201
    rows: list[dict[str, Any]] = []
    try:
        for row in measure(setting, sizes):
            rows.append(row)
            if arguments.output is not None:
                arguments.output.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n")
    except TokenmillError as error:
        parser.error(error.message)
    print(table(rows), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
