"""Image files made of so many parts that reading them takes much more time or memory than they have bytes."""

import io
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import encoded, noise
from tokenmill_server.multimodal import file_structure
from tokenmill_server.multimodal.decode import decode
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.file_structure import check_structure

MAX_PIXELS = 10**7
JPEG = encoded(noise(30, 50), "JPEG")
PNG = encoded(noise(30, 50))
GIF = encoded(Image.new("P", (50, 30)), "GIF")
ODD_CHUNK = bytes(4) + b"prIv" + struct.pack(">I", zlib.crc32(b"prIv"))


def with_segments(count: int, segment: bytes) -> bytes:
    return JPEG[:2] + count * segment + JPEG[2:]


def with_chunks(before: int, behind: int = 0) -> bytes:
    """Chunks of no known meaning before and behind those with pixels."""
    return PNG[:33] + before * ODD_CHUNK + PNG[33:-12] + behind * ODD_CHUNK + PNG[-12:]


def with_comment(count: int) -> bytes:
    """A comment of so many blocks of one byte."""
    at = 13 + (3 << (GIF[10] & 7) + 1)
    return GIF[:at] + b"\x21\xfe" + count * b"\x01x" + b"\0" + GIF[at:]


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan comes so many times more."""
    data = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + count * last + data[-2:]


def with_runs(count: int) -> bytes:
    """A BMP of 50 x 30 pixels whose lines are compressed, with so many empty runs in front of its first pixel."""
    lines = count * b"\0\2\0\0" + 30 * (b"\x32\x07" + b"\0\0") + b"\0\1"
    start = 14 + 40 + 1024
    head = struct.pack("<IIIHHIIIIII", 40, 50, 30, 1, 8, 1, len(lines), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", start + len(lines), 0, 0, start) + head + bytes(range(256)) * 4 + lines


@pytest.mark.parametrize(
    "data",
    [
        with_segments(500, b"\xff\xe5\0\x04ab"),
        with_segments(1, b"\xff\xe1\0\x08abcdef" + b"\xff" * 50),
        with_chunks(1000, 1000),
        with_comment(20_000),
        with_scans(50),
        with_runs(1000),
    ],
    ids=["segments", "padding", "chunks", "blocks", "scans", "runs"],
)
def test_many_parts(data: bytes) -> None:
    """What real files may have."""
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    np.testing.assert_array_equal(np.asarray(decode(data, MAX_PIXELS).image), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (with_segments(300_000, b"\xff\xe5\0\x02"), "segments"),
        (with_segments(300_000, b"\xff\xe1\0\x09Exif\0\0x"), "segments"),
        (with_segments(1, b"\xff\xc8" + 10_000 * b"\xff\xe5\0\x02"), "segments"),
        (with_segments(300_000, b"\xff\xd9"), "segments"),
        (with_scans(300_000), "scans"),
        (with_chunks(300_000), "parts"),
        (with_chunks(0, 600_000), "parts"),
        (with_comment(1_000_000), "parts"),
        (with_runs(3_000_000), "parts"),
    ],
    ids=["segments", "exif", "hidden", "ends", "scans", "chunks", "chunks behind", "blocks", "runs"],
)
def test_too_many_parts(data: bytes, parts: str) -> None:
    with pytest.raises(MediaError, match=f"(too many|more than 1024|more than 100) {parts}"):
        decode(data, MAX_PIXELS)


def test_a_file_of_too_many_scans_takes_no_time() -> None:
    """Each scan of this one takes milliseconds: all would take more than ten minutes."""
    data = encoded(Image.new("L", (3000, 3000), 128), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    start = time.monotonic()
    with pytest.raises(MediaError, match="more than 100 scans, which is the limit"):
        decode(data[:-2] + 300_000 * last + data[-2:], MAX_PIXELS)
    assert time.monotonic() - start < 60


def tiled(side: int) -> bytes:
    """A TIFF of 64 x 64 pixels, all in one tile."""
    pixels = zlib.compress(bytes(side * side))
    tags = [(256, 64), (257, 64), (258, 8), (259, 8), (262, 1), (277, 1), (322, side), (323, side)]
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    tags += [(324, start), (325, len(pixels))]
    return (
        b"II*\0"
        + struct.pack("<IH", 8, len(tags))
        + b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
        + bytes(4)
        + pixels
    )


def test_a_tile_counts_with_all_its_pixels() -> None:
    sizes = []
    data = tiled(1024)
    assert decode(data, MAX_PIXELS, lambda height, width: sizes.append((height, width))).width == 64
    assert sizes == [(1024, 1024)]
    with pytest.raises(MediaError, match="1024 x 1024 pixels, more than the 1048575"):
        decode(data, 1024 * 1024 - 1)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("is_big", [False, True])
@pytest.mark.parametrize("tag", [322, 323])
@pytest.mark.parametrize("kind", [5, 17, 18])
def test_tiles_of_a_size_that_libtiff_alone_reads(order: str, is_big: bool, tag: int, kind: int) -> None:
    """Types of numbers that Pillow passes over."""
    image = encoded(Image.fromarray(noise(30, 50)), "TIFF", compression="tiff_lzw", big_tiff=is_big)
    assert decode(image, MAX_PIXELS).width == 50
    head, count, entry = ("HHHQ", "Q", "HHQQ") if is_big else ("HI", "H", "HHII")
    versions = (43, 8, 0, 16) if is_big else (42, 8)
    tags = [(256, 4, 1, 1), (tag, kind, 1, 30_000)]
    data = (
        {"<": b"II", ">": b"MM"}[order] + struct.pack(order + head, *versions) + struct.pack(order + count, len(tags))
    )
    for each in tags:
        data += struct.pack(order + entry, *each)
    with pytest.raises(MediaError, match="tiles have no size"):
        check_structure(data)
    for length in range(len(data) - struct.calcsize(order + entry), -1, -1):  # says nothing of tiles
        check_structure(data[:length])


def test_a_tiff_of_very_many_tags() -> None:
    with pytest.raises(MediaError, match="more than 1024 tags"):
        check_structure(b"II*\0" + struct.pack("<IH", 8, 5000) + bytes(12 * 5000))
    check_structure(b"II+\0" + struct.pack("<HHQ", 8, 0, 2**64 - 1))


def test_no_piece_of_a_file_is_searched_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams would wait. Whatever stands between two pieces is found."""
    monkeypatch.setattr(file_structure, "_PIECE_BYTES", 64)
    for data in (
        JPEG,
        encoded(noise(80, 70), "JPEG", progressive=True),
        with_scans(200),
        with_segments(20, b"\xff\xff\xe5\0\x04ab"),
    ):
        pieces = list(file_structure._jpeg_segments(data))
        with monkeypatch.context() as whole:
            whole.setattr(file_structure, "_PIECE_BYTES", 1 << 30)
            assert list(file_structure._jpeg_segments(data)) == pieces
        assert pieces.count(0xDA) == data.count(b"\xff\xda")


def test_odd_tags_are_nothing_to_write_into_the_log(tmp_path: Path) -> None:
    """Python would print each and remember it for ever."""
    exif = b"Exif\0\0II*\0" + struct.pack("<IH", 8, 500)
    exif += b"".join(struct.pack("<HHII", 1000 + tag, 7, 1 << 20, 8) for tag in range(500)) + bytes(4)
    file = tmp_path / "image.png"
    file.write_bytes(encoded(noise(30, 50), exif=exif))
    program = (
        "import pathlib, sys; from tokenmill_server.multimodal.decode import decode;"
        "print(decode(pathlib.Path(sys.argv[1]).read_bytes(), 10000).width)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("50\n", "")
