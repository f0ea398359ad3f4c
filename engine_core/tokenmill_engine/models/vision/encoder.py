"""What a vision encoder takes and gives, whichever it is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill_engine.layers.placement import Target
from tokenmill_engine.models.vision.blocks import SumShape

PREFIX = "visual."
"""Of the names that we give to an encoder's parameters."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """One image or video, prepared as `MediaConfig.kind` says."""

    pixel_values: torch.Tensor
    """float32 as the encoder sees them, or uint8 with `values`; on any device."""
    grid: tuple[int, int, int] | None = None
    """(time, height, width) in patches, where images differ in size."""
    values: torch.Tensor | None = None
    """float32 [num_channels, 256]: what pixels become."""
    is_video: bool = False


class VisionEncoder(Protocol):
    """From pixels to rows as wide as the decoder's hidden states."""

    def targets(self) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter, in one spelling; `mapping` knows the others. Valid until
        `finalize`."""

    def finalize(self) -> None:
        """Brings the loaded weights into the form that the device's kernels like best."""

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """The rows of each image, [num_tokens, output_size] on the encoder's device, computed together.

        Raises ValueError for pixels that do not fit the grid or the size that the encoder sees.
        """

    def sums(self, images: Sequence[ImageInput]) -> Iterator[SumShape]:
        """What `encode` of the same images adds up over the workers that have the encoder between them, in order, all
        of the model's dtype. Raises ValueError as that does for grids."""
