"""The load generator's images: sizes, numbers, repeats, and that they are what they are said to be."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from tokenmill_server.bench.random_images import ImageShape, RandomImage, draw_images, make_image, parse_sizes


def opened(image: RandomImage) -> Image.Image:
    return Image.open(io.BytesIO(file_of(image)))


def file_of(image: RandomImage) -> bytes:
    return base64.b64decode(image.url.partition("base64,")[2])


@pytest.mark.parametrize("file_format", ["jpeg", "png"])
def test_images_are_what_they_say(file_format: str) -> None:
    image = make_image((37, 21), 5, file_format)  # type: ignore[arg-type]
    assert image.url.startswith(f"data:image/{file_format};base64,")
    assert image.num_file_bytes == len(file_of(image))
    picture = opened(image)
    assert (picture.size, picture.mode, picture.format) == ((37, 21), "RGB", file_format.upper())
    assert np.asarray(picture).std() > 10
    assert make_image((37, 21), 5, file_format) == image  # type: ignore[arg-type]
    assert make_image((37, 21), 6, file_format) != image  # type: ignore[arg-type]


def test_files_weigh_about_what_photographs_do() -> None:
    image = make_image((512, 384), 0)
    assert 0.1 < image.num_file_bytes / (512 * 384) < 1.0


def test_sizes_of_a_list_come_equally_often() -> None:
    shape = ImageShape(parse_sizes("8x8, 12x20"), num_per_request=2)
    drawn = [image.size for images in draw_images(shape, 100, 0) for image in images]
    assert len(drawn) == 200
    assert set(drawn) == {(8, 8), (12, 20)}
    assert 60 < drawn.count((8, 8)) < 140


def test_sizes_between_two_are_even_on_a_logarithmic_scale() -> None:
    (sizes,) = parse_sizes("16x32..64x128")
    rng = np.random.default_rng(0)
    drawn = [sizes.draw(rng) for _ in range(1000)]
    assert all(16 <= width <= 64 and 32 <= height <= 128 for width, height in drawn)
    assert 400 < sum(width < 32 for width, _ in drawn) < 600
    assert 400 < sum(height < 64 for _, height in drawn) < 600
    assert str(sizes) == "16x32..64x128"
    assert str(sizes.divided(16)) == "1x2..4x8"


@pytest.mark.parametrize("text", ["", "8", "8x", "0x8", "8x8..", "8x8..4x9", "99999x99999", "8x8;9x9"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_sizes(text)


def test_numbers_of_images_vary() -> None:
    shape = ImageShape(parse_sizes("4x4"), num_per_request=4, range_ratio=0.5)
    numbers = [len(images) for images in draw_images(shape, 60, 0)]
    assert set(numbers) == {2, 3, 4, 5, 6}


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 400, 400), (0.75, 60, 140), (1.0, 1, 1)])
def test_a_share_of_images_was_sent_before(share: float, least: int, most: int) -> None:
    shape = ImageShape(parse_sizes("4x4"), num_per_request=4, repeat_share=share, format="png")
    drawn = [image for images in draw_images(shape, 100, 3) for image in images]
    different = {id(image) for image in drawn}
    assert least <= len(different) <= most
    assert len({image.url for image in drawn}) == len(different)


def test_one_seed_gives_the_same_images() -> None:
    shape = ImageShape(parse_sizes("4x4..9x9"), num_per_request=2, repeat_share=0.3)
    assert draw_images(shape, 5, 1) == draw_images(shape, 5, 1)
    assert draw_images(shape, 5, 1) != draw_images(shape, 5, 2)
