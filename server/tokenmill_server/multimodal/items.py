"""Prepared media of any kind: what processors make, caches remember and prompts are given."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.ipc.object_store import Lease
from tokenmill_engine.messages import MediaItem, MediaTensor


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PreparedItem:
    """An image or a video as the engine takes it, without its place in a prompt."""

    kind: str
    """As in `MediaItem`."""
    key: bytes
    """32 bytes; equal if and only if the encoder would see the same."""
    num_tokens: int
    grid: tuple[int, int, int] | None
    tensors: dict[str, MediaTensor]
    """Empty where the engine is believed to have them."""
    seconds_per_step: float | None = None
    """As in `MediaItem`."""
    parts: tuple["PreparedItem", ...] = ()
    """Of a video between whose frames stands text: the groups of frames, which are what the engine takes. Then the item
    itself has no tensors, and its tokens are those of all parts."""
    times: tuple[float, ...] = ()
    """Seconds from the start of the video, of each part."""
    lease: Lease | None = None
    """Of what is being sent: keeps the bytes of the tensors in shared memory. None: they are in the tensors, if there
    are any."""

    @property
    def pieces(self) -> tuple["PreparedItem", ...]:
        """What the engine takes: the parts, or the item itself."""
        return self.parts or (self,)

    def at(self, offset: int) -> MediaItem:
        """The item in a prompt whose token `offset` is the first of its placeholders."""
        return MediaItem(self.kind, self.key, offset, self.num_tokens, self.grid, self.tensors, self.seconds_per_step)

    def without_tensors(self) -> "PreparedItem":
        """All that is needed of it if its tensors are elsewhere."""
        return replace(self, tensors={}, parts=tuple(part.without_tensors() for part in self.parts))


def media_tensor(values: NDArray[np.uint8] | NDArray[np.float32]) -> MediaTensor:
    """`values` of any shape as messages have them, copied only if they are not contiguous."""
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    return MediaTensor(values.dtype.name, values.shape, data.toreadonly())
