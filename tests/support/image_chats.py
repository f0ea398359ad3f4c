"""What transformers answers to chats with images: its own image processors, its own model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from numpy.typing import NDArray

from tests.support.media_forward import MediaPrompt, Reference
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.models.vision.encoder import ImageInput


class ImageOracle:
    """One model, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        media = resolve_model(str(folder)).media
        assert media is not None
        self._media = media
        self._reference = Reference(folder, media)
        name = json.loads((folder / "preprocessor_config.json").read_text())["image_processor_type"]
        self._processor: Any = getattr(transformers, f"{name}Pil").from_pretrained(folder)

    def greedy(
        self, prompt_token_ids: Sequence[int], images: Sequence[NDArray[np.uint8]], answer: Sequence[int]
    ) -> list[int]:
        """The most likely token in place of each of `answer`: equal to it if and only if each was. The prompt's runs of
        image tokens are `images` [height, width, 3] in order; it is checked that they are as long as in transformers.
        """
        places = [at for at, token_id in enumerate(prompt_token_ids) if token_id == self._media.image_token_id]
        prompt = MediaPrompt(list(prompt_token_ids), [])
        for image in self._prepare_views(images) if self._media.views is not None else map(self._prepare, images):
            (rows,) = self._reference.encode([image])
            place, places = places[: len(rows)], places[len(rows) :]
            assert place == list(range(place[0], place[0] + len(rows)))
            prompt.images.append((place[0], image))
        assert places == []
        # Behind an image token that a model of random weights came upon, transformers would look for its image.
        token_id, known = self._media.image_token_id, list(answer)
        known = known[: known.index(token_id) + 1] if token_id in known else known
        chosen: list[int] = self._reference.logits(prompt, known[:-1])[-len(known) :].argmax(-1).tolist()
        return chosen + list(answer[len(known) :])

    def _prepare_views(self, images: Sequence[NDArray[np.uint8]]) -> list[ImageInput]:
        """Several images are seen otherwise than one."""
        views = self._media.views
        assert views is not None
        if not images:
            return []
        prepared = self._processor([list(images)], return_tensors="pt", input_data_format="channels_last")
        inputs = []
        for pixels, size in zip(prepared["pixel_values"], prepared["image_sizes"].tolist(), strict=True):
            num_views = 1 if len(images) > 1 else 1 + views.num_tiles(*size)
            inputs.append(ImageInput(pixels[:num_views], (num_views, size[0], size[1])))
        return inputs

    def _prepare(self, image: NDArray[np.uint8]) -> ImageInput:
        prepared = self._processor(image, return_tensors="pt", input_data_format="channels_last")
        if self._media.kind == "llava":
            return ImageInput(prepared["pixel_values"][0])
        time, height, width = prepared["image_grid_thw"][0].tolist()
        return ImageInput(prepared["pixel_values"], (time, height, width))
