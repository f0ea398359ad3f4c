"""What transformers answers to chats with images and videos, given the same frames."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.support import video_oracle
from tests.support.image_chats import ImageOracle
from tests.support.media_forward import MediaPrompt, VideoInput, num_placeholders
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_server.multimodal.video_options import read_video_options

Frames = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shown:
    """Of a video that was sent: the frames that the model sees, and how many of a second they are."""

    frames: list[Frames]
    fps: float


class MediaOracle(ImageOracle):
    """One model, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._options = read_video_options(folder, self._media)

    @property
    def has_limits(self) -> bool:
        """Whether the sizes of frames follow from limits of their pixels."""
        return self._options.views is None

    @property
    def is_counted_by_frame(self) -> bool:
        """Whether limits of pixels are those of a frame, not of all together."""
        return self._options.method == "qwen2_vl"

    def answer(
        self, prompt_token_ids: Sequence[int], media: Sequence[Frames | Shown], given: Sequence[int]
    ) -> list[int]:
        """As `greedy`, for videos too."""
        ids, start = list(prompt_token_ids), 0
        prompt = MediaPrompt(ids, [])
        for item in (item for each in media for item in self._items(each)):
            token_id = self._media.video_token_id if isinstance(item, VideoInput) else self._media.image_token_id
            place = ids.index(token_id, start)  # type: ignore[arg-type]
            start = place + num_placeholders(self._media, item)
            assert set(ids[place:start]) == {token_id}
            prompt.images.append((place, item))
        tokens = (self._media.image_token_id, self._media.video_token_id)
        assert not set(tokens) & set(ids[start:])
        # Behind such a token that a model of random weights came upon, transformers would look for its image.
        ends = [given.index(token_id) + 1 for token_id in tokens if token_id in given]
        known = list(given)[: min(ends, default=len(given))]
        chosen: list[int] = self._reference.logits(prompt, known[:-1])[-len(known) :].argmax(-1).tolist()
        return chosen + list(given[len(known) :])

    def _items(self, media: Frames | Shown) -> list[ImageInput]:
        if not isinstance(media, Shown):
            return [self._prepare(media)] if self._media.views is None else self._prepare_views([media])
        options = self._options
        if options.views is not None:
            return [self._viewed(media, options.views.view_size)]
        step, size = options.temporal_patch_size, options.patch_size
        height, width = video_oracle.resized_size(*media.frames[0].shape[:2], len(media.frames), options)
        frames = np.stack([np.asarray(Image.fromarray(each).resize((width, height), 3)) for each in media.frames])
        values: Any = torch.from_numpy(video_oracle.patches(frames, options))
        grid = (-(-len(frames) // step), height // size, width // size)
        if self._media.frames_apart:
            return [VideoInput(group, (1, *grid[1:])) for group in values.chunk(grid[0])]
        seconds = None if self._media.tokens_per_second is None else step / media.fps
        return [VideoInput(values, grid, seconds_per_step=seconds)]

    def _viewed(self, media: Shown, size: int) -> VideoInput:
        """Every frame in one size."""
        frames = np.stack([np.asarray(Image.fromarray(each).resize((size, size), 3)) for each in media.frames])
        values = video_oracle.normalized(frames, self._options)
        return VideoInput(values, (len(frames), size, size), is_video=True)
