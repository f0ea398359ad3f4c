"""Drives a model that looks at images as `PagedForward` does one of text, and asks transformers for the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.media_items import VALUES, make_pixels, seen_values, tensor_of, with_values
from tests.support.paged_forward import PagedForward
from tests.support.tiny_media_models import LLAVA_IMAGE_SIZE, MERGE_SIZE, PATCH_SIZE, TEMPORAL_PATCH_SIZE
from tests.support.tiny_models import VOCAB_SIZE
from tokenmill_engine.attention.batch import ForwardBatch, MediaRows
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.messages import MediaTensor
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.mrope import Grid, GridSpan, mrope_positions

_TEXT_TOKENS = VOCAB_SIZE - 12
"""Ids below that stand for text."""
_FIRST_SEED = 10
"""Behind some other images a model of random weights comes upon image tokens, whose images transformers would want."""


@dataclass(frozen=True, slots=True)
class VideoInput(ImageInput):
    """A video, or of one with text between its frames those that become one."""

    seconds_per_step: float | None = None


def random_video(media: MediaConfig, grid: Grid, seed: int, seconds: float | None = None) -> VideoInput:
    """A prepared video, as the encoder sees it; each frame of a patch has pixels of its own. Where frames have one
    size, `grid` is their number and that size."""
    if media.views is not None:
        frames = make_pixels((grid[0], 3, *grid[1:]), seed)
        return VideoInput(torch.from_numpy(seen_values(with_values(frames))), grid, is_video=True)
    size = (int(np.prod(grid)), 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2)
    values = torch.from_numpy(seen_values(with_values(make_pixels(size, seed))))
    return VideoInput(values, grid, is_video=True, seconds_per_step=seconds)


def random_image(media: MediaConfig, grid: Grid, seed: int) -> ImageInput:
    """A prepared image, as the encoder sees it; models with one size of image have no use for the grid."""
    if media.views is not None:
        height, width = 7 * grid[1], 7 * grid[2]
        return view_image((1 + media.views.num_tiles(height, width), height, width), seed)
    if media.kind == "llava":
        tensors = with_values(make_pixels((3, LLAVA_IMAGE_SIZE, LLAVA_IMAGE_SIZE), _FIRST_SEED + seed))
        return ImageInput(torch.from_numpy(seen_values(tensors)))
    tensors = with_values(make_pixels((int(np.prod(grid)), 3 * PATCH_SIZE**2), _FIRST_SEED + seed))
    return ImageInput(torch.from_numpy(seen_values(tensors, TEMPORAL_PATCH_SIZE)), grid)


def view_image(grid: Grid, seed: int) -> ImageInput:
    """An image in so many views as `grid` (views, height, width) says."""
    pixels = make_pixels((grid[0], 3, LLAVA_IMAGE_SIZE, LLAVA_IMAGE_SIZE), _FIRST_SEED + seed)
    return ImageInput(torch.from_numpy(seen_values(with_values(pixels))), grid)


def tensors_of(image: ImageInput) -> dict[str, MediaTensor]:
    """Those of the item that `random_image` or `random_video` gives the values of."""
    values = image.pixel_values.numpy()
    if values.ndim == 4:
        views = [np.searchsorted(VALUES[channel], values[:, channel]) for channel in range(3)]
        return with_values(tensor_of(np.stack(views, axis=1).astype(np.uint8)))
    if image.grid is not None:
        values = values.reshape(len(values), 3, TEMPORAL_PATCH_SIZE, -1).swapaxes(0, 1)
        values = values if isinstance(image, VideoInput) else values[:, :, :1]
    pixels = np.stack([np.searchsorted(VALUES[channel], values[channel]) for channel in range(3)]).astype(np.uint8)
    if image.grid is not None:
        pixels = pixels.swapaxes(0, 1).reshape(values.shape[1], -1)
    return with_values(tensor_of(pixels))


def num_placeholders(media: MediaConfig, image: ImageInput) -> int:
    if media.views is not None and image.grid is not None and image.is_video:
        return media.views.num_video_rows(image.grid[0])
    if media.views is not None and image.grid is not None:
        return media.views.num_rows(*image.grid)
    if image.grid is None:
        assert media.vision.tokens_per_image is not None
        return media.vision.tokens_per_image
    return int(np.prod(image.grid)) // MERGE_SIZE**2


@dataclass(slots=True)
class MediaPrompt:
    """Token ids, and the images with the place of the first placeholder of each."""

    tokens: list[int]
    images: list[tuple[int, ImageInput]]

    def positions(self, media: MediaConfig) -> tuple[np.ndarray[Any, np.dtype[np.int32]], int]:
        """[3, num_tokens], and what to add for later tokens."""
        grids = [
            GridSpan(offset, image.grid, _time_step(media, image))
            for offset, image in self.images
            if image.grid is not None and media.mrope_section is not None
        ]
        return mrope_positions(len(self.tokens), grids, media.vision.spatial_merge_size)


def _time_step(media: MediaConfig, image: ImageInput) -> float:
    if isinstance(image, VideoInput) and image.seconds_per_step is not None:
        return (media.tokens_per_second or 0.0) * image.seconds_per_step
    return 1.0


def prompt(media: MediaConfig, parts: Sequence[int | ImageInput], seed: int = 0) -> MediaPrompt:
    """As many random tokens of text as a number says, and images between them."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    images: list[tuple[int, ImageInput]] = []
    for part in parts:
        if isinstance(part, ImageInput):
            images.append((len(tokens), part))
            token_id = media.video_token_id if isinstance(part, VideoInput) else media.image_token_id
            assert token_id is not None
            tokens += [token_id] * num_placeholders(media, part)
        else:
            tokens += rng.integers(3, _TEXT_TOKENS, part).tolist()
    return MediaPrompt(tokens, images)


class MediaForward:
    """Requests named by strings, which begin with a prompt each."""

    def __init__(
        self,
        model: MediaDecoder,
        media: MediaConfig,
        prompts: dict[str, MediaPrompt],
        block_size: int = 16,
        *,
        has_rows: bool = True,
    ) -> None:
        """`has_rows`: what the encoder gives is with this one of several workers."""
        self.paged = PagedForward(model, block_size=block_size)
        self._model, self._media = model, media
        self._prompts = prompts
        self.done = dict.fromkeys(prompts, 0)
        self._places = {name: text.positions(media) for name, text in prompts.items()}
        self._rows = {
            name: list(zip((offset for offset, _ in text.images), rows, strict=True))
            for name, text in prompts.items()
            for rows in [[rows * has_rows for rows in model.encode([image for _, image in text.images])]]
        }

    def step(self, work: Sequence[tuple[str, Sequence[int]]]) -> dict[str, torch.Tensor]:
        """Computes the next tokens of each request; logits [num_tokens, vocab_size] by request."""
        ordered = sorted(work, key=lambda item: len(item[1]) != 1)
        batch = self.prepare(ordered)
        hidden = self._model.forward(batch, self.paged.kv_caches)
        pieces = self._model.compute_logits(hidden).split([len(tokens) for _, tokens in ordered])
        return {name: piece for (name, _), piece in zip(ordered, pieces, strict=True)}

    def chunk(self, name: str, count: int) -> tuple[str, Sequence[int]]:
        """The next `count` tokens of a prompt, for `step`."""
        return name, self._prompts[name].tokens[self.done[name] : self.done[name] + count]

    def prepare(self, work: Sequence[tuple[str, Sequence[int]]]) -> ForwardBatch:
        """As in `PagedForward`, with images and positions."""
        batch = self.paged.prepare(work)
        places: list[np.ndarray[Any, Any]] = []
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        start = 0
        for name, new in work:
            first = self.done[name]
            last = self.done[name] = first + len(new)
            known, delta = self._places[name]
            later = np.tile(np.arange(known.shape[1], max(last, known.shape[1])) + delta, (3, 1))
            places.append(np.concatenate((known, later), axis=1)[:, first:last])
            for offset, of_image in self._rows[name]:
                seen = range(max(first, offset), min(last, offset + len(of_image)))
                tokens += [start + index - first for index in seen]
                rows += [of_image[index - offset] for index in seen]
            start += len(new)
        if self._media.mrope_section is not None:
            batch.positions = torch.from_numpy(np.concatenate(places, axis=1).astype(np.int32))
        if rows:
            batch.media = MediaRows(torch.tensor(tokens), torch.stack(rows))
        return batch


class Reference:
    """The same model in transformers."""

    def __init__(self, folder: Path, media: MediaConfig) -> None:
        import transformers

        self._media = media
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    @torch.no_grad()
    def logits(self, text: MediaPrompt, later: Sequence[int] = ()) -> torch.Tensor:
        """[num_tokens, vocab_size] of a prompt and what comes after it."""
        token_ids = torch.tensor([[*text.tokens, *later]])
        inputs = self._inputs(text, token_ids)
        has_video = any(isinstance(image, VideoInput) for _, image in text.images)
        if has_video and self._media.mrope_section is not None:
            inputs["position_ids"] = self._positions_of_the_paper(text, len(later))
        result: torch.Tensor = self.model(input_ids=token_ids, **inputs).logits[0]
        return result

    def _positions_of_the_paper(self, text: MediaPrompt, num_later: int) -> torch.Tensor:
        """[3, 1, num_tokens]. After a long video transformers 5 counts on from its height or width, which it did not in
        version 4, and Qwen's own code does not."""
        places, delta = text.positions(self._media)
        later = np.tile(np.arange(len(text.tokens), len(text.tokens) + num_later) + delta, (3, 1))
        return torch.from_numpy(np.concatenate((places, later), axis=1)).long()[:, None]

    def greedy(self, text: MediaPrompt, count: int) -> list[int]:
        """The most likely tokens, one after another."""
        chosen: list[int] = []
        for _ in range(count):
            chosen.append(int(self.logits(text, chosen)[-1].argmax()))
        return chosen

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """Rows of each image."""
        pixels = [image.pixel_values for image in images]
        with torch.no_grad():
            if self._media.views is not None:
                return [self._encode_views(image) for image in images]
            if self._media.kind == "llava":
                return list(self.model.model.get_image_features(torch.stack(pixels)).pooler_output)
            grids = torch.tensor([image.grid for image in images])
            features = self.model.model.get_image_features(torch.cat(pixels), grids)
            layers = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
            counts = [num_placeholders(self._media, image) for image in images]
            # Some versions have the rows of all images in one tensor.
            by_image = [layer.split(counts) if isinstance(layer, torch.Tensor) else layer for layer in layers]
            return [torch.cat(rows, dim=1) for rows in zip(*by_image, strict=True)]

    def _encode_views(self, image: ImageInput) -> torch.Tensor:
        """In one view an image is seen beside others alone: beside itself."""
        assert image.grid is not None
        times = 2 if image.grid[0] == 1 else 1
        pixels, sizes = torch.cat([image.pixel_values] * times), torch.tensor([image.grid[1:]] * times)
        result = self.model.model.get_image_features(pixels, sizes, batch_num_images=torch.tensor([times]))
        rows: torch.Tensor = result.pooler_output[0]
        return rows

    def positions(self, text: MediaPrompt) -> tuple[torch.Tensor, int]:
        """[3, num_tokens], and what to add for later tokens."""
        token_ids = torch.tensor([text.tokens])
        inputs = self._inputs(text, token_ids)
        named = {key: inputs[key] for key in ("video_grid_thw", "second_per_grid_ts") if key in inputs}
        places, delta = self.model.model.get_rope_index(
            token_ids, inputs["mm_token_type_ids"], inputs.get("image_grid_thw"), **named
        )
        return places[:, 0], int(delta)

    def _inputs(self, text: MediaPrompt, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        media = self._media
        videos = [image for _, image in text.images if isinstance(image, VideoInput)]
        images = [image for _, image in text.images if not isinstance(image, VideoInput)]
        pixels = [image.pixel_values for image in images]
        if media.kind == "llava":
            return {"pixel_values": torch.stack(pixels)} if pixels else {}
        if media.views is not None:
            inputs = _inputs_of_views([image.grid for image in images if image.grid is not None], pixels)
            frames = {"pixel_values_videos": torch.stack([video.pixel_values for video in videos])} if videos else {}
            return inputs | frames
        kinds = (token_ids == media.image_token_id).int() + 2 * (token_ids == media.video_token_id).int()
        inputs = {"mm_token_type_ids": kinds}
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels)
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in images])
        if videos:
            inputs["pixel_values_videos"] = torch.cat([video.pixel_values for video in videos])
            grids = torch.tensor([video.grid for video in videos])
            # Frames with text between them are one video there.
            inputs["video_grid_thw"] = _joined(grids) if media.frames_apart else grids
            seconds = [video.seconds_per_step for video in videos if video.seconds_per_step is not None]
            if seconds:
                inputs["second_per_grid_ts"] = torch.tensor(seconds)
        return inputs


def _inputs_of_views(grids: Sequence[Grid], pixels: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Images in one view are those of prompts with several of them."""
    if not pixels:
        return {}
    counts: list[int] = []
    for is_single, of_kind in groupby(grids, lambda grid: grid[0] == 1):
        num_images = len(list(of_kind))
        assert not is_single or num_images > 1
        counts += [num_images] if is_single else [1] * num_images
    sizes = torch.tensor([grid[1:] for grid in grids])
    return {"pixel_values": torch.cat(list(pixels)), "image_sizes": sizes, "batch_num_images": torch.tensor(counts)}


def _joined(grids: torch.Tensor) -> torch.Tensor:
    """Neighbouring videos of one size, [num_videos, 3], as one."""
    sizes, counts = torch.unique_consecutive(grids[:, 1:], dim=0, return_counts=True)
    return torch.cat((counts[:, None], sizes), dim=1)
