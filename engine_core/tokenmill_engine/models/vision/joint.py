"""An encoder that several workers have between them, in which one may fail alone, for want of memory, say.

The others are in the middle of sums then, and on GPUs so are their kernels. So who has failed takes part in the sums
that are left, with nothing to add, and only then says that it has failed. What comes of it is of no use to anybody;
workers must ask each other whether all of them have succeeded.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from tokenmill_engine.distributed.group import Group
from tokenmill_engine.errors import EngineDeadError, EngineError
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_engine.models.vision.blocks import SumShape
from tokenmill_engine.models.vision.encoder import ImageInput, VisionEncoder

logger = logging.getLogger(__name__)


class EncodingError(Exception):
    """Images could not be encoded; whoever encodes together can go on."""


class JointEncoder:
    """A `VisionEncoder`: one worker's part."""

    def __init__(self, make: Callable[[Group], VisionEncoder], placement: Placement) -> None:
        """`make` gives the part of a member of a group, placed as `placement` says but for that group."""
        self._sums = _CountedSums(placement.group)
        self._encoder = make(self._sums)
        self._dtype, self._device = placement.dtype, placement.device

    def targets(self) -> Iterator[tuple[str, Target]]:
        """As in `VisionEncoder`."""
        return self._encoder.targets()

    def finalize(self) -> None:
        """As in `VisionEncoder`."""
        self._encoder.finalize()

    def sums(self, images: Sequence[ImageInput]) -> Iterator[SumShape]:
        """As in `VisionEncoder`."""
        return self._encoder.sums(images)

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """As in `VisionEncoder`.

        Raises:
            EncodingError: this worker has failed, and all that it owes to the others is done.
            EngineDeadError: it cannot do that.
        """
        shapes = list(self.sums(images))
        self._sums.count = 0
        try:
            return self._encoder.encode(images)
        except (EngineError, torch.AcceleratorError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.debug("in the middle of %d images", len(images), exc_info=error)
        # Out of the handler: what the encoder had computed is free.
        self._finish(shapes[self._sums.count :], reason)
        raise EncodingError(reason)

    def _finish(self, shapes: Sequence[SumShape], reason: str) -> None:
        """Take part in sums of these `shapes`."""
        try:
            nothing = torch.zeros(
                max((rows * width for rows, width in shapes), default=0), dtype=self._dtype, device=self._device
            )
        except RuntimeError as error:
            raise EngineDeadError(f"an encoder failed in the middle of its sums: {reason}") from error
        for rows, width in shapes:
            self._sums.all_reduce(nothing[: rows * width].view(rows, width))


class _CountedSums:
    """A `Group` that counts its sums."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self.count = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = self._group.all_reduce(x)
        self.count += 1
        return total

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("encoders add up and nothing else")

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("encoders add up and nothing else")

    def agree_min(self, value: int) -> int:
        return self._group.agree_min(value)
