"""Images on a worker's device: outputs of the encoder, by entry, and what a step's batch needs of them.

The scheduler says what to encode, what to free and which rows stand in for which placeholders; here that is done. An
image that cannot be encoded fails the requests that look at it and nobody else. Of several workers that share each
layer one keeps the rows of an image (`encoder_shares`) and tells if it has not got them; where they encode together and
one fails, all go without. In stages behind the first, images are nothing but positions.
"""

import logging
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.batch import MediaRows
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import EngineError
from tokenmill_engine.messages import MediaTensor
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.outputs import EncoderInput, PlaceholderRows, StepMedia, StepPlan
from tokenmill_engine.sampling.transfer import to_device
from tokenmill_engine.worker.encoder_shares import EncoderShare
from tokenmill_engine.worker.encoder_time import EncoderTime
from tokenmill_engine.worker.inputs import MissingRows, StepInputs
from tokenmill_engine.worker.media_links import MediaLinks
from tokenmill_engine.worker.slot_positions import SlotPositions

logger = logging.getLogger(__name__)

BATCH_TOKENS = 4096
"""Small images take longer to be launched than to be computed, unless several are computed at once; more than so many
tokens at once take more memory and no less time."""

_DTYPES = {"float32": torch.float32, "uint8": torch.uint8}


class EncoderOutputs:
    """What was encoded and not freed yet, by entry."""

    def __init__(self, model: MediaDecoder, share: EncoderShare, links: MediaLinks | None = None) -> None:
        self._model = model
        self._share = share
        self._links = links or MediaLinks()
        self._outputs: dict[int, torch.Tensor] = {}
        self._elsewhere: set[int] = set()
        """Entries whose rows another worker keeps."""

    @property
    def num_tokens(self) -> int:
        """Rows of all outputs that are here."""
        return sum(map(len, self._outputs.values()))

    def clear(self) -> None:
        """Free everything."""
        self._outputs.clear()
        self._elsewhere.clear()

    def apply(self, media: StepMedia) -> EncoderTime | None:
        """Free and encode, without a wait for the device. Returns how long encoding takes; None if there is nothing to
        encode."""
        self._elsewhere.difference_update(media.free)
        for entry in media.free:
            self._outputs.pop(entry, None)
        if not media.encode:
            return None
        duration = EncoderTime(self._model.device)
        keepers = self._share.keepers(media.encode)
        self._elsewhere.update(
            image.entry for image, keeper in zip(media.encode, keepers, strict=True) if keeper != self._share.rank
        )
        mine = [image for image, keeper in zip(media.encode, keepers, strict=True) if self._share.computes(keeper)]
        for batch in batches(mine):
            for entry, rows in self._encode(batch).items():
                if entry not in self._elsewhere:
                    self._outputs[entry] = rows
        duration.end()
        return duration

    def rehearse(self, images: Sequence[EncoderInput]) -> None:
        """Enqueue: encode them in one batch, whichever worker would keep their rows, and keep none."""
        self._encode(images)

    def _encode(self, images: Sequence[EncoderInput]) -> dict[int, torch.Tensor]:
        """Rows [num_tokens, row_size] by entry, of those images for which that works; of workers that encode together,
        for which it works on all of them."""
        ready = [self._ready(image) for image in images]
        are_ready = self._share.agreed([each is not None for each in ready])
        prepared = [
            (image, each)
            for image, each, is_ready in zip(images, ready, are_ready, strict=True)
            if is_ready and each is not None
        ]
        results = self._encode_ready(prepared)
        for image in [image for image in images if image.entry in results]:
            num_rows = len(results[image.entry])
            if num_rows != image.num_tokens:
                logger.error("an image became %d rows and has %d placeholders", num_rows, image.num_tokens)
                del results[image.entry]
        return results

    def _encode_ready(self, prepared: Sequence[tuple[EncoderInput, ImageInput]]) -> dict[int, torch.Tensor]:
        """In one batch; one by one if that fails, so that the others do not fail with one."""
        if not prepared:
            return {}
        rows = self._rows(prepared)
        if self._share.agreed([rows is not None]) == [True] and rows is not None:
            return {image.entry: each for (image, _), each in zip(prepared, rows, strict=True)}
        del rows  # their memory is needed
        if len(prepared) == 1:
            return {}
        return {entry: each for one in prepared for entry, each in self._encode_ready([one]).items()}

    def _rows(self, prepared: Sequence[tuple[EncoderInput, ImageInput]]) -> list[torch.Tensor] | None:
        """Of each image, in one batch; None if that fails."""
        try:
            rows = self._model.encode([ready for _, ready in prepared])
            # Each has memory of its own, which is free when it is let go.
            return [each.clone() for each in rows] if len(rows) > 1 else rows
        except (EngineError, torch.AcceleratorError):
            raise
        except Exception as error:
            if len(prepared) == 1:
                _log_failure(prepared[0][0], error)
            return None

    def _ready(self, image: EncoderInput) -> ImageInput | None:
        """With its pixels on the device; None if they cannot be brought there, or are nowhere any more."""
        try:
            tensors = self._links.tensors(image)
            if tensors is None:
                return None
            device = self._model.device
            pixels, values = (device_tensor(tensors[name], device) for name in ("pixel_values", "values"))
            return self._model.ready(ImageInput(pixels, image.grid, values, image.kind == "video"))
        except (EngineError, torch.AcceleratorError):
            raise
        except Exception as error:
            _log_failure(image, error)
            return None

    def gather(self, places: list[PlaceholderRows], query_start: NDArray[np.int32]) -> tuple[MediaRows, MissingRows]:
        """Which tokens of the batch are replaced by what, of several workers by zeros on all but one; rows of the plan
        whose images should be here and are not."""
        device, dtype, row_size = self._model.device, self._model.dtype, self._model.row_size
        tokens: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        rows = [torch.empty(0, row_size, dtype=dtype, device=device)]
        missing = MissingRows()
        for place in places:
            output = self._outputs.get(place.entry)
            if output is not None:
                rows.append(output[place.first : place.first + place.count])
            elif place.entry in self._elsewhere:
                rows.append(torch.zeros(place.count, row_size, dtype=dtype, device=device))
            else:
                missing.add(place.row, place.entry)
                continue
            first = int(query_start[place.row]) + place.start
            tokens.append(np.arange(first, first + place.count, dtype=np.int64))
        return MediaRows(to_device(np.concatenate(tokens), device), torch.cat(rows)), missing


def batches(images: Sequence[EncoderInput]) -> Iterator[list[EncoderInput]]:
    """In order, in batches of at most `BATCH_TOKENS` tokens; a larger image is one of its own."""
    batch: list[EncoderInput] = []
    num_tokens = 0
    for image in images:
        if batch and num_tokens + image.num_tokens > BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
        batch.append(image)
        num_tokens += image.num_tokens
    if batch:
        yield batch


def _log_failure(image: EncoderInput, error: Exception) -> None:
    logger.error("an image of %d tokens could not be encoded: %s", image.num_tokens, error)


class MediaInputs:
    """Completes the batches of a model that looks at images, on the CPU."""

    def __init__(
        self,
        model: MediaDecoder,
        config: MediaConfig,
        num_slots: int,
        share: EncoderShare,
        links: MediaLinks,
    ) -> None:
        self.outputs = EncoderOutputs(model, share, links) if model.stage.is_first else None
        self._links = links
        has_mrope = config.mrope_section is not None
        merge_size, rate = config.vision.spatial_merge_size, config.tokens_per_second
        self._positions = SlotPositions(num_slots, merge_size, rate) if has_mrope else None

    def forget(self) -> None:
        """Free all outputs."""
        if self.outputs is not None:
            self.outputs.clear()

    def complete(self, plan: StepPlan, inputs: StepInputs) -> None:
        """Encodes what the plan brings; adds rows, positions and what is missing to the step's `inputs`."""
        batch, query_start = inputs.batch, inputs.rows.query_start
        if plan.media is not None and self.outputs is not None:
            inputs.rows.encoder_time = self.outputs.apply(plan.media)
            batch.media, missing = self.outputs.gather(plan.media.rows, query_start)
            if missing.rows:
                inputs.rows.missing = missing
                self._links.tell_missing(missing.told(plan.step))
        if self._positions is not None:
            self._positions.start(plan.starts)
            positions = self._positions.turn(plan.slots, batch.positions.numpy(), query_start)
            batch.positions = torch.from_numpy(positions)


def device_tensor(tensor: MediaTensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, on its way there through pinned memory if it is a GPU."""
    return as_tensor(tensor, pinned=device.type == "cuda").to(device, non_blocking=True)


def as_tensor(tensor: MediaTensor, pinned: bool = False) -> torch.Tensor:
    """A copy: the message's bytes must not be written to."""
    result = torch.empty(math.prod(tensor.shape), dtype=_DTYPES[tensor.dtype], pin_memory=pinned)
    np.copyto(result.numpy(), np.frombuffer(tensor.data, np.dtype(tensor.dtype).newbyteorder("<")))
    return result.view(tensor.shape)
