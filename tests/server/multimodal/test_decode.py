"""Decoded images against transformers' `load_image`, and what is refused."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from tests.support.pictures import encoded, noise
from tokenmill_server.multimodal import decode as decoding
from tokenmill_server.multimodal.decode import decode
from tokenmill_server.multimodal.errors import MediaError

MAX_PIXELS = 10**6


def rgb() -> Image.Image:
    return Image.fromarray(noise(30, 50))


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(rgb(), "JPEG", exif=exif)


def with_alpha() -> Image.Image:
    image = rgb().convert("RGBA")
    image.putalpha(Image.fromarray(noise(30, 50)[:, :, 0]))
    return image


def palette(seed: int) -> Image.Image:
    image = Image.fromarray(noise(30, 50)[:, :, 0] % 16, "L").copy()
    paletted = Image.new("P", image.size)
    paletted.putdata(list(image.tobytes()))
    paletted.putpalette(noise(16, 1, seed).tobytes())
    return paletted


FILES: dict[str, Callable[[], bytes]] = {
    "png": lambda: encoded(rgb()),
    "jpeg": lambda: encoded(rgb(), "JPEG"),
    "webp": lambda: encoded(rgb(), "WEBP", lossless=True),
    "bmp": lambda: encoded(rgb(), "BMP"),
    "tiff": lambda: encoded(rgb(), "TIFF", compression="tiff_lzw"),
    "gif": lambda: encoded(palette(1), "GIF"),
    "palette": lambda: encoded(palette(1)),
    "transparent palette": lambda: encoded(palette(2), transparency=3),
    "alpha": lambda: encoded(with_alpha()),
    "grey": lambda: encoded(rgb().convert("L")),
    "grey and alpha": lambda: encoded(with_alpha().convert("LA")),
    "16 bits": lambda: encoded(noise(30, 50)[:, :, 0].astype(np.uint16) * 257),
    "one bit": lambda: encoded(rgb().convert("1")),
    "cmyk": lambda: encoded(rgb().convert("CMYK"), "JPEG"),
    "animated gif": lambda: encoded(palette(1), "GIF", save_all=True, append_images=[palette(2)]),
    "animated png": lambda: encoded(rgb(), save_all=True, append_images=[with_alpha().convert("RGB")]),
    "two pictures": lambda: encoded(rgb(), "MPO", save_all=True, append_images=[rgb()]),
    **{f"orientation {value}": lambda value=value: turned(value) for value in range(1, 9)},  # type: ignore[misc]
}


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_transformers(name: str) -> None:
    data = FILES[name]()
    picture = decode(data, MAX_PIXELS)
    wanted = np.asarray(load_image(Image.open(io.BytesIO(data))))
    assert picture.image.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(picture.image), wanted)
    assert (picture.height, picture.width) in ((30, 50), (50, 30))


def test_palettes_make_a_difference() -> None:
    """The same bytes of pixels with another palette are another image."""
    assert not np.array_equal(*(np.asarray(decode(encoded(palette(number)), MAX_PIXELS).image) for number in (1, 2)))


@pytest.mark.parametrize("name", ["png", "jpeg", "webp", "bmp", "tiff", "gif"])
def test_truncated_files(name: str) -> None:
    data = FILES[name]()
    for length in (0, 1, 10, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(MediaError, match=r"damaged or incomplete|no image that can be read|empty"):
            decode(data[:length], MAX_PIXELS)


@pytest.mark.parametrize(
    "data",
    [
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        b'<?xml version="1.0"?><svg/>',
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        b"%PDF-1.7\n",
        b"<html></html>",
        b"P6 10 10 255\n" + bytes(300),
        b"\0" * 1000,
    ],
)
def test_other_kinds_of_files(data: bytes) -> None:
    with pytest.raises(MediaError, match="no image that can be read"):
        decode(data, MAX_PIXELS)


def bomb(width: int, height: int) -> bytes:
    """A PNG file that declares many pixels in few bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("size", [(1001, 1000), (10_000, 10_000), (30_000, 30_000), (2**31 - 1, 2**31 - 1)])
def test_pixels_are_limited_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(MediaError, match=r"--max-image-pixels|damaged"):
        decode(bomb(*size), MAX_PIXELS)


def test_a_limit_is_a_limit() -> None:
    data = encoded(noise(10, 10))
    assert decode(data, 100).width == 10
    with pytest.raises(MediaError, match="10 x 10 pixels, more than the 99"):
        decode(data, 99)


def test_room_is_made_before_a_pixel_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def reserve(height: int, width: int) -> None:
        sizes.append((height, width))
        monkeypatch.setattr(decoding, "to_picture", real)

    real = decoding.to_picture
    monkeypatch.setattr(decoding, "to_picture", None)
    assert decode(encoded(noise(20, 30)), MAX_PIXELS, reserve).width == 30
    assert sizes == [(20, 30)]


def test_a_server_without_memory_does_not_blame_the_image() -> None:
    def reserve(height: int, width: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        decode(encoded(noise(20, 30)), MAX_PIXELS, reserve)
