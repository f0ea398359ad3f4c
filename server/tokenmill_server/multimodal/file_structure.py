"""Refuses image files that are built of very many parts.

Pillow keeps an object for each part, tens of times as large as a part may be, and libjpeg goes over the whole image
once for each scan, of which some dozen bytes are enough: files within all other limits could take hours, or all memory.
"""

import io
import math
import re
import struct
from collections.abc import Iterator

from tokenmill_server.multimodal.errors import MediaError

_MAX_SCANS = 100
"""Of a progressive JPEG; libtiff allows as many. Encoders write about ten."""
_MAX_SEGMENTS = 1024
"""Of a JPEG, all told: a colour profile may need 255, each scan a few."""
_MAX_READS_TO_OPEN = 1 << 16
_MAX_READS = {"PNG": 1 << 20, "BMP": 1 << 23}
"""Two or three for each block or chunk of a file, and two for each run of a compressed BMP, which takes a microsecond:
Pillow reads them in Python."""

_JPEG_START = b"\xff\xd8\xff"
_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_WITHOUT_LENGTH = frozenset({0x01, 0xC8, _SOI, _EOI, *range(0xF0, 0xFE)})
"""Markers that nothing belongs to, or whose segments Pillow does not pass over as a whole."""
_PIECE_BYTES = 64 * 1024
"""That are searched at a time: other threads get no turn meanwhile."""
_TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_TILE_TAGS = (322, 323)
_KNOWN_TYPES = (3, 4)
"""16 and 32 bits. Pillow passes over those of some others, which libtiff reads."""


def check_structure(data: bytes) -> None:
    """Raises MediaError for a JPEG of too many segments or scans, and a TIFF whose tiles may be larger than they seem.
    What else may be wrong is for its decoder to find."""
    if data.startswith(_TIFF_STARTS):
        _check_tile_tags(data)
    if not data.startswith(_JPEG_START):
        return
    num_scans = 0
    for num_segments, marker in enumerate(_jpeg_segments(data), 1):
        num_scans += marker == _SOS
        if num_scans > _MAX_SCANS or num_segments > _MAX_SEGMENTS:
            raise _too_many(*(("scans", _MAX_SCANS) if num_scans > _MAX_SCANS else ("segments", _MAX_SEGMENTS)))


def _jpeg_segments(data: bytes) -> Iterator[int]:
    """The markers up to the end of the first picture."""
    position, has_pixels = 0, False
    while (end := _next_marker(data, position)) is not None:
        marker, position = data[end - 1], end
        if marker == _EOI and has_pixels:
            return
        if marker not in _WITHOUT_LENGTH:
            position += max(2, int.from_bytes(data[position : position + 2]))
        has_pixels |= marker == _SOS
        yield marker


def _next_marker(data: bytes, start: int) -> int | None:
    """Where the next one ends."""
    while start < len(data):
        end = start + _PIECE_BYTES
        found = _MARKER.search(data, start, end)
        if found is not None:
            return found.end()
        start = end - 1  # one may begin with the last byte
    return None


def _check_tile_tags(data: bytes) -> None:
    """Of the first image in a TIFF."""
    order, is_big = "<" if data[:2] == b"II" else ">", 43 in data[2:4]
    place, count, entry = ("8xQ", "Q", "HH16x") if is_big else ("4xI", "H", "HH8x")
    try:
        (start,) = struct.unpack_from(order + place, data)
        (num_tags,) = struct.unpack_from(order + count, data, start)
    except (OverflowError, struct.error):
        return  # there is none
    if num_tags > _MAX_SEGMENTS:
        raise _too_many("tags", _MAX_SEGMENTS)
    start, size = start + struct.calcsize(order + count), struct.calcsize(order + entry)
    tags = data[start : start + size * num_tags]
    for tag, kind in struct.iter_unpack(order + entry, tags[: len(tags) // size * size]):
        if tag in _TILE_TAGS and kind not in _KNOWN_TYPES:
            raise MediaError("the image file is damaged: its tiles have no size")


class CountedFile(io.BytesIO):
    """A file in memory that Pillow may read only so often: once for each part of it, whatever its format calls them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._reads_left: float = _MAX_READS_TO_OPEN

    def opened(self, kind: str | None) -> None:
        """The head of an image of this format of Pillow's was read; now come its pixels. Only in PNG files may other
        things follow them, and only those of BMP files may be read one by one."""
        self._reads_left = _MAX_READS.get(kind or "", math.inf)

    def read(self, size: int | None = -1, /) -> bytes:
        self._reads_left -= 1
        if self._reads_left < 0:
            raise MediaError("the image file is made of too many parts; save it anew")
        return super().read(size)


def _too_many(parts: str, most: int) -> MediaError:
    return MediaError(f"the image file is made of more than {most} {parts}, which is the limit; save it anew")
