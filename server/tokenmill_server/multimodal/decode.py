"""From the bytes of an image file to pixels: what transformers' `load_image` makes of them, within limits.

Which pixels: the EXIF orientation is applied, an animation gives its first picture, and the conversion to RGB is
Pillow's, which leaves transparency out and cuts grey values of 16 bits off at 255.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from tokenmill_server.multimodal.asking import NobodyHasRoomError
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.file_structure import CountedFile, check_structure

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of what is decoded. All are pictures of pixels: no programs, such as SVG and EPS, and none for which
Pillow would call another program."""
_NAMES = "PNG, JPEG, WebP, GIF, BMP and TIFF"

# The limit is ours, below: Pillow's warning would only say the same of what is allowed.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# What files have wrong beside their pixels, each time in other words, which Python would all print and keep.
warnings.filterwarnings("ignore", module=r"PIL\.")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, decoded and upright."""

    image: Image.Image
    """In RGB."""

    @property
    def height(self) -> int:
        return self.image.height

    @property
    def width(self) -> int:
        return self.image.width


def decode(data: bytes, max_pixels: int, reserve: Callable[[int, int], None] | None = None) -> Picture:
    """Decodes an image file. Takes long: call it in a thread. `reserve` is called with its height and width before any
    pixel is decoded, and may wait.

    Raises MediaError for what is no image of a known kind, is damaged or incomplete, or has more than `max_pixels`,
    which is known before any is decoded.
    """
    with opened(data, max_pixels) as file:
        if reserve is not None:
            reserve(file.height, file.width)
        return to_picture(file.image)


@dataclass(frozen=True, slots=True)
class OpenedImage:
    """An image whose pixels are not decoded yet, and the size of what will be."""

    image: Image.Image
    height: int
    width: int


@contextmanager
def opened(data: bytes, max_pixels: int) -> Iterator[OpenedImage]:
    """An image file of which the header has been read and no more. Raises as `decode` does, also for what goes wrong
    with the image while it is open."""
    if not data:
        raise MediaError("the image is empty: it has no bytes")
    try:
        check_structure(data)
        file = CountedFile(data)
        with Image.open(file, formats=FORMATS) as image:
            file.opened(image.format)
            check_size(image.size, max_pixels)
            width, height = _decoded_size(image)
            check_size((width, height), max_pixels)
            yield OpenedImage(image, height, width)
    except (MediaError, MemoryError, NobodyHasRoomError):  # the last two say nothing of the image
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(max_pixels) from error
    except UnidentifiedImageError as error:
        raise MediaError(f"the media are no image that can be read; {_NAMES} can") from error
    except Exception as error:  # Pillow's decoders raise whatever broken data make them stumble over
        raise MediaError("the image file is damaged or incomplete") from error


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raises MediaError for an image with too many pixels, or none. `size`: width and height."""
    width, height = size
    if width * height > max_pixels:
        raise MediaError(
            f"the image has {width} x {height} pixels, more than the {max_pixels} that --max-image-pixels allows"
        )
    if width * height == 0:
        raise MediaError("the image is empty: it has no pixels")


def _decoded_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of what is decoded: a tile of a TIFF may be larger than the image, and is decoded as a whole."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return image.size
    tags = image.tag_v2
    tile = (tags.get(TiffImagePlugin.TILEWIDTH, 0), tags.get(TiffImagePlugin.TILELENGTH, 0))
    width, height = (max(each, of_tile) for each, of_tile in zip(image.size, tile, strict=True))
    return width, height


def to_picture(image: Image.Image) -> Picture:
    """The pixels of an image of Pillow's, upright and in RGB. It is not changed."""
    image.load()
    # Both would copy an image which they need not change.
    is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) != 1
    upright = ImageOps.exif_transpose(image) if is_turned else image
    return Picture(upright if upright.mode == "RGB" else upright.convert("RGB"))


def _too_large(max_pixels: int) -> MediaError:
    return MediaError(f"the image has more pixels than the {max_pixels} that --max-image-pixels allows")
