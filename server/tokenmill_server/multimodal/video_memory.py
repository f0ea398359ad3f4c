"""How much memory a video takes while it is decoded and prepared, in this process and in that which decodes it."""

from collections.abc import Callable
from typing import TypeVar

from tokenmill_server.multimodal.asking import Check
from tokenmill_server.multimodal.decoding_memory import DecodingMemory, Lease

T = TypeVar("T")

_PROGRAM_BYTES = 64 * 2**20
"""A process with its libraries, before it has opened anything."""
_SMALL_BYTES = 128 * 2**20
"""What a decoder takes beside frames, and what allocators keep."""
_FRAMES_IN_DECODER = 20
"""That a decoder may hold at a time, at most: 16 to refer to, and some on their way."""
_BYTES_PER_PIXEL = 6
"""Of a frame in a decoder: up to 16 bits for each of three channels."""
_BYTES_PER_IMAGE_PIXEL = 24
"""Of the one frame that is being converted, turned and written."""
_BYTES_PER_RESIZED_PIXEL = 8
_BYTES_PER_WANTED_PIXEL = 9
"""Of all frames that were decoded, in this process: in rows, with one more for an odd number, and in patches."""


class MoreMemoryError(Exception):
    """A video turns out to need more memory than it has: it has to wait for all of it."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class VideoShare:
    """What one video has."""

    def __init__(self, lease: Lease, num_file_bytes: int) -> None:
        self._lease = lease
        self._num_file_bytes = num_file_bytes

    @property
    def child_bytes(self) -> int:
        """Of that, what the process may take which decodes, beside itself and the copy of the file that it reads."""
        return max(0, self._lease.num_bytes - _PROGRAM_BYTES - self._num_file_bytes)

    def fit(self, num_pixels: int, wanted: tuple[int, int, int]) -> int:
        """Once it is known what the video is, it has what it needs and no more. `num_pixels`: of a frame. `wanted`:
        number, height and width of the frames that are looked at. Returns bytes as `child_bytes`.

        Raises MoreMemoryError if that is not there at once, and MediaError for more than a video may have.
        """
        num_frames, height, width = wanted
        child = _child_bytes(self._num_file_bytes, num_pixels) + _BYTES_PER_RESIZED_PIXEL * height * width
        here = _BYTES_PER_WANTED_PIXEL * num_frames * height * width
        num_bytes = _PROGRAM_BYTES + self._num_file_bytes + child + here
        if not self._lease.resize(num_bytes):
            raise MoreMemoryError(num_bytes)
        return child


def with_share(
    memory: DecodingMemory, num_file_bytes: int, max_pixels: int, work: Callable[[VideoShare], T], check: Check
) -> T:
    """What `work` returns, which is called with what the largest video would need, of which it is to `fit` what this
    one does; and again if that was too little.

    Raises what `work` and `check` do, and MediaError for a file that alone is too large.
    """
    least = _PROGRAM_BYTES + num_file_bytes + _child_bytes(num_file_bytes, 0)
    most = _PROGRAM_BYTES + num_file_bytes + _child_bytes(num_file_bytes, max_pixels)
    num_bytes = max(least, min(most, memory.most("video")))
    while True:
        try:
            with memory.lease("video") as lease:
                lease.take(num_bytes, check)
                return work(VideoShare(lease, num_file_bytes))
        except MoreMemoryError as error:
            num_bytes = error.num_bytes


def _child_bytes(num_file_bytes: int, num_pixels: int) -> int:
    """`num_pixels`: of a frame."""
    per_pixel = _FRAMES_IN_DECODER * _BYTES_PER_PIXEL + _BYTES_PER_IMAGE_PIXEL
    return _SMALL_BYTES + num_file_bytes + per_pixel * num_pixels
