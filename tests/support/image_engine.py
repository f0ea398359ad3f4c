"""An engine core over a model that looks at images, with its executor, driven as its process would."""

import dataclasses
import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.media_forward import MediaPrompt, VideoInput, num_placeholders, tensors_of
from tests.support.model_loading import model_config
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.engine import EngineCore, Executor
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import AddRequest, FinishReason, MediaItem, SamplingParams, StepOutput

BLOCK_SIZE = 4
NUM_BLOCKS = 200


def image_config(folder: Path, scheduler: SchedulerConfig, **changes: Any) -> EngineConfig:
    """On the CPU, in float32."""
    return EngineConfig(
        model=model_config(folder),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=changes.pop("num_blocks", NUM_BLOCKS)),
        scheduler=dataclasses.replace(scheduler, max_num_seqs=8),
        device=DeviceConfig(kind="cpu", num_threads=1),
        **changes,
    )


def items_of(media: MediaConfig, prompt: MediaPrompt) -> tuple[MediaItem, ...]:
    """The images of a prompt as a front end would send them."""
    items = []
    for offset, image in prompt.images:
        tensors = tensors_of(image)
        key = hashlib.sha256(tensors["pixel_values"].data + str(image.grid).encode()).digest()
        kind, seconds = ("video", image.seconds_per_step) if isinstance(image, VideoInput) else ("image", None)
        items.append(MediaItem(kind, key, offset, num_placeholders(media, image), image.grid, tensors, seconds))
    return tuple(items)


class ImageEngine:
    """One API server's view of it."""

    def __init__(self, config: EngineConfig, executor: Executor | None = None, capacity: Any = None) -> None:
        if executor is None:
            executor = UniprocExecutor(config)
            capacity = executor.initialize()
        assert config.model.media is not None
        self.media = config.model.media
        self.core = EngineCore(config, executor, capacity)
        self.tokens: dict[int, list[int]] = {}
        self.cached: dict[int, int] = {}
        self.errors: dict[int, str | None] = {}
        self._next_id = 0

    def add(self, prompt: MediaPrompt, max_tokens: int = 8, media: tuple[MediaItem, ...] | None = None) -> int:
        """Greedy, without end tokens. Returns the request's id."""
        request_id = self._next_id
        self._next_id += 1
        self.tokens[request_id] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        token_ids = np.array(prompt.tokens, dtype="<i4").tobytes()
        items = items_of(self.media, prompt) if media is None else media
        self.core.handle(AddRequest(request_id, f"label-{request_id}", token_ids, sampling, 0.0, media=items))
        return request_id

    def ask(self, prompts: Iterable[MediaPrompt], max_tokens: int = 8) -> list[list[int]]:
        """Answers to all of them, at once."""
        request_ids = [self.add(prompt, max_tokens) for prompt in prompts]
        self.run()
        return [self.tokens[request_id] for request_id in request_ids]

    def run(self) -> None:
        """Until nothing is left to do."""
        while True:
            has_work = self.core.has_work
            for _, output in self.core.step():
                if isinstance(output, StepOutput):
                    self._take(output)
            self.core.scheduler.check_invariants()
            if not has_work:
                return

    def _take(self, output: StepOutput) -> None:
        request_ids = np.frombuffer(output.request_ids, "<i8").tolist()
        counts = np.frombuffer(output.num_tokens, "<i4")
        pieces = np.split(np.frombuffer(output.token_ids, "<i4"), np.cumsum(counts)[:-1])
        for request_id, piece in zip(request_ids, pieces, strict=True):
            self.tokens[request_id] += piece.tolist()
        self.cached.update((request_ids[index], count) for index, count in output.cached_tokens)
        for finish in output.finishes:
            if finish.reason is FinishReason.ERROR:
                self.errors[request_ids[finish.index]] = finish.message
