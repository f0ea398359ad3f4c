"""Refuses image files that are built of very many parts.

Pillow keeps an object for each part, tens of times as large as a part may be, and libjpeg goes over the whole image
once for each scan, of which some dozen bytes are enough: files within all other limits could take hours, or all memory.
"""

import io
import re
from collections.abc import Iterator

from tokenmill_server.multimodal.errors import MediaError

_MAX_SCANS = 100
"""Of a progressive JPEG; libtiff allows as many. Encoders write about ten."""
_MAX_SEGMENTS = 1024
"""Of a JPEG, all told: a colour profile may need 255, each scan a few."""
_MAX_READS_TO_OPEN = 1 << 16
_MAX_READS_OF_PNG = 1 << 20
"""Two or three for each block or chunk of a file."""

_JPEG_START = b"\xff\xd8\xff"
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_WITHOUT_LENGTH = frozenset({0x01, 0xC8, _SOI, _EOI, *range(0xF0, 0xFE)})
"""Markers that nothing belongs to, or whose segments Pillow does not pass over as a whole."""


def check_structure(data: bytes) -> None:
    """Raises MediaError for a JPEG of too many segments or scans. What else may be wrong is for its decoder to find."""
    if not data.startswith(_JPEG_START):
        return
    num_scans = 0
    for num_segments, marker in enumerate(_jpeg_segments(data), 1):
        num_scans += marker == _SOS
        if num_scans > _MAX_SCANS or num_segments > _MAX_SEGMENTS:
            raise _too_many("scans" if num_scans > _MAX_SCANS else "segments")


def _jpeg_segments(data: bytes) -> Iterator[int]:
    """The markers up to the end of the first picture."""
    position, has_pixels = 0, False
    while (found := _MARKER.search(data, position)) is not None:
        marker, position = found[1][0], found.end()
        if marker == _EOI and has_pixels:
            return
        if marker not in _WITHOUT_LENGTH:
            position += max(2, int.from_bytes(data[position : position + 2]))
        has_pixels |= marker == _SOS
        yield marker


class CountedFile(io.BytesIO):
    """A file in memory that Pillow may read only so often: once for each part of it, whatever its format calls them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left: float = _MAX_READS_TO_OPEN

    def opened(self, kind: str | None) -> None:
        """The head of an image of this format of Pillow's was read; now come its pixels. Only in PNG files may other
        things follow them."""
        self._reads_left = _MAX_READS_OF_PNG if kind == "PNG" else float("inf")

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise _too_many("parts")
        return super().read(size)


def _too_many(parts: str) -> MediaError:
    return MediaError(f"the image file is made of too many {parts}; save it anew")
