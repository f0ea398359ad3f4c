"""How much decoding and preparing large images delays an API server's event loop, on which all streams are served.

Images are of photograph-like content, sent as `data:` addresses and prepared as for Qwen2.5-VL (with the limits
of its own settings), by as many threads as asked for, one behind another. Meanwhile a coroutine asks to be woken up
every millisecond and measures how late it was: with large images decoded in threads (`--processes 0`) and in processes,
in turns. The same is measured with nothing to do, and with nothing to do while other programs keep as many cores busy,
since a busy machine delays as well.

    python benchmarks/image_delays.py --formats JPEG PNG WEBP --megapixels 20 --threads 2 --processes 0 2 --rounds 3
"""

import argparse
import asyncio
import base64
import io
import itertools
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvloop
from PIL import Image

from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_server.multimodal.image_options import ImageOptions
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import ImageSource
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.settings import MediaSettings

_STEP_S = 0.001
_SAVING: Mapping[str, Mapping[str, Any]] = {
    "JPEG": {"quality": 90},
    "WEBP": {"method": 0},
    "PNG": {"compress_level": 1},
}
_MEDIA = MediaConfig(
    "qwen2_vl",
    7,
    VisionConfig("qwen2_5_vl", 1280, 3420, 32, 16, 14, 2048, "silu", temporal_patch_size=2, spatial_merge_size=2),
)
_OPTIONS = ImageOptions(
    method="qwen2_vl",
    resample=3,
    rescale_factor=1 / 255,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
    patch_size=14,
    temporal_patch_size=2,
    merge_size=2,
    min_pixels=3136,
    max_pixels=12845056,
)


@dataclass(frozen=True)
class Load:
    """What there is to do."""

    format: str
    """Pillow's name."""
    megapixels: float
    num_threads: int
    num_images: int
    """For each thread."""


def photograph(format: str, megapixels: float, seed: int) -> str:
    """A `data:` address, three times as wide as it is high by two."""
    height = round((megapixels * 1e6 * 2 / 3) ** 0.5)
    width = height * 3 // 2
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (height // 40, width // 40, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels += random.integers(-8, 9, pixels.shape, np.int16)
    stream = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(stream, format, **_SAVING.get(format, {}))
    return f"data:image/{format.lower()};base64," + base64.b64encode(stream.getvalue()).decode()


async def delays_during(work: Callable[[], Awaitable[None]]) -> list[float]:
    """Milliseconds by which each wake-up was late until `work` was done."""
    late: list[float] = []
    task = asyncio.ensure_future(work())
    while not task.done():
        wanted = time.perf_counter() + _STEP_S
        await asyncio.sleep(_STEP_S)
        late.append(1000 * (time.perf_counter() - wanted))
    await task
    return late


def line(name: str, late: list[float]) -> str:
    p50, p99, p999 = np.percentile(late, [50, 99, 99.9])
    return f"{name:<32} {len(late):>7} {p50:>8.2f} {p99:>8.2f} {p999:>8.2f} {max(late):>8.2f}"


async def measure(load: Load, urls: list[str], num_processes: int) -> str:
    settings = MediaSettings(loading_threads=load.num_threads, image_processes=num_processes)
    prepared = PreparedMedia(CachePlacement(Placement.NOWHERE, 0, 0))
    loader = MediaLoader(ImageProcessor(_MEDIA, _OPTIONS), settings, prepared)

    async def load_one(url: str) -> None:
        await loader.load([ImageSource(url, "auto", "image")], TokenRoom(1 << 30, 1 << 30))

    async def decode(url: str) -> None:
        for _ in range(load.num_images):
            await load_one(url)

    async def all_threads() -> None:
        await asyncio.gather(*map(decode, urls))

    await asyncio.gather(*map(load_one, urls))  # starts the processes
    began, cpu_began = time.perf_counter(), time.process_time()
    busy = await delays_during(all_threads)
    seconds = (time.perf_counter() - began) / load.num_images / load.num_threads
    cpu_seconds = (time.process_time() - cpu_began) / load.num_images / load.num_threads
    loader.close()
    title = f"{load.format} {load.megapixels:g} MP, {num_processes or 'no'} processes"
    return f"{line(title, busy)}   {seconds:.2f} s an image, {cpu_seconds:.3f} s of CPU time here"


async def measure_idle(num_hogs: int) -> str:
    """With other processes that keep so many cores busy: what no program can change."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_hogs)]
    try:
        late = await delays_during(lambda: asyncio.sleep(5))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    return line(f"nothing to do, {num_hogs} cores busy", late)


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["JPEG"], help="Pillow's names")
    parser.add_argument("--megapixels", type=float, nargs="+", default=[20.0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=10, help="for each thread")
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 2], help="for large images, each in turn")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    write(f"{'event loop late, ms':<32} {'samples':>7} {'p50':>8} {'p99':>8} {'p99.9':>8} {'max':>8}")
    for format, megapixels in itertools.product(args.formats, args.megapixels):
        load = Load(format, megapixels, args.threads, args.images)
        urls = [photograph(format, megapixels, seed) for seed in range(args.threads)]
        for _ in range(args.rounds):
            for num_hogs in (0, args.threads):
                write(uvloop.run(measure_idle(num_hogs)))
            for num_processes in args.processes:
                write(uvloop.run(measure(load, urls, num_processes)))


if __name__ == "__main__":
    main()
