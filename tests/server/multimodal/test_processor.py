"""Prepared images against transformers' own processors: equal, bit for bit."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import (
    CLIPImageProcessorPil,
    LlavaImageProcessorPil,
    LlavaOnevisionImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)

from tests.support.media_items import seen_values
from tests.support.pictures import noise, picture
from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.image_options import read_image_options
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.processor import ImageProcessor

SIZES = [(224, 224), (37, 91), (301, 17), (640, 480), (480, 641), (1, 1), (2, 150), (28, 28), (999, 333)]

_SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "output_size": 64,
    "activation": "gelu",
}  # fmt: skip
QWEN = MediaConfig(
    "qwen2_vl",
    7,
    VisionConfig("qwen2_vl", patch_size=14, temporal_patch_size=2, spatial_merge_size=2, **_SHAPE),
)


def tower(kind: Any, image_size: int, patch_size: int = 14) -> MediaConfig:
    return MediaConfig("llava", 7, VisionConfig(kind, patch_size=patch_size, image_size=image_size, **_SHAPE))


SQUARE = {"height": 56, "width": 56}


def edges(shortest: int, crop: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": shortest}, "crop_size": {"height": crop, "width": crop}}


def processor(folder: Path, media: MediaConfig, config: dict[str, Any]) -> ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return ImageProcessor(media, read_image_options(folder, media))


def values_of(image: PreparedItem, times: int = 1) -> NDArray[np.float32]:
    """What the encoder sees; the pixels themselves have a byte each."""
    assert image.tensors["pixel_values"].dtype == "uint8"
    return seen_values(image.tensors, times)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    "limits",
    [{}, {"min_pixels": 3136, "max_pixels": 50176}, {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 4}}],
)
def test_qwen2_vl(height: int, width: int, limits: dict[str, Any], tmp_path: Path) -> None:
    oracle = Qwen2VLImageProcessorPil(**limits)
    ours = processor(tmp_path, QWEN, {"image_processor_type": "Qwen2VLImageProcessor", **limits})
    pixels = noise(height, width)
    wanted = oracle(pixels, return_tensors="np", input_data_format="channels_last")
    image = ours.prepare(picture(pixels))
    np.testing.assert_array_equal(values_of(image, times=2), wanted["pixel_values"])
    assert image.grid == tuple(wanted["image_grid_thw"][0])
    assert image.num_tokens == np.prod(wanted["image_grid_thw"][0]) // 4


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(
    ("oracle", "media", "config"),
    [
        (CLIPImageProcessorPil, tower("clip", 224), {}),
        (CLIPImageProcessorPil, tower("clip", 30), edges(31, 30)),
        (CLIPImageProcessorPil, tower("clip", 56), edges(41, 56)),
        (CLIPImageProcessorPil, tower("clip", 56), {"size": SQUARE, "do_center_crop": False, "resample": 2}),
        (CLIPImageProcessorPil, tower("clip", 224), {"do_normalize": False}),
        (CLIPImageProcessorPil, tower("clip", 224), {"rescale_factor": 0.01, "image_mean": [0.1, 0.2, 0.3]}),
        (SiglipImageProcessorPil, tower("siglip", 224), {}),
        (SiglipImageProcessorPil, tower("siglip", 56), {"size": SQUARE}),
        (LlavaImageProcessorPil, tower("clip", 56), {"do_pad": True, **edges(56, 56)}),
    ],
)
def test_towers(
    height: int, width: int, oracle: Any, media: MediaConfig, config: dict[str, Any], tmp_path: Path
) -> None:
    name = oracle.__name__.removesuffix("Pil")
    ours = processor(tmp_path, media, {"image_processor_type": name, **config})
    pixels = noise(height, width)
    if name == "CLIPImageProcessor" and max(height, width) > 50 * min(height, width):
        pixels = pixels[:, :20]
    wanted = oracle(**config)(pixels, return_tensors="np", input_data_format="channels_last")["pixel_values"][0]
    image = ours.prepare(picture(pixels))
    np.testing.assert_array_equal(values_of(image), wanted)
    assert image.grid is None
    assert image.num_tokens == media.vision.tokens_per_image


PINPOINTS = [[56, 56], [56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
ONEVISION = MediaConfig(
    "llava_onevision",
    7,
    VisionConfig("siglip", patch_size=14, image_size=56, drops_first=False, feature_layers=(2,), **_SHAPE),
    views=ViewsConfig(tuple((height, width) for height, width in PINPOINTS), 2, 56, 4),
)


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("config", [{}, {"resample": 2, "image_mean": [0.5, 0.2, 0.9]}])
def test_views(height: int, width: int, config: dict[str, Any], tmp_path: Path) -> None:
    config = {"size": SQUARE, "image_grid_pinpoints": PINPOINTS, **config}
    ours = processor(tmp_path, ONEVISION, {"image_processor_type": "LlavaOnevisionImageProcessor", **config})
    oracle, pixels = LlavaOnevisionImageProcessorPil(**config), noise(height, width)
    alone = oracle([pixels], return_tensors="np", input_data_format="channels_last")
    image = ours.prepare(picture(pixels))
    np.testing.assert_array_equal(values_of(image), alone["pixel_values"][0])
    assert image.grid == (len(alone["pixel_values"][0]), height, width)
    several = oracle([[pixels, noise(20, 30)]], return_tensors="np", input_data_format="channels_last")
    whole = ours.prepare(picture(pixels), "low")
    np.testing.assert_array_equal(values_of(whole), several["pixel_values"][0])
    assert (whole.grid, whole.num_tokens) == ((1, height, width), 17)
    assert whole.key != image.key


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_normalize": False}, "do_normalize"),
        ({"image_grid_pinpoints": [[56, 56]]}, "not those of config.json"),
        ({"size": {"height": 56, "width": 58}}, "56 x 56"),
        ({"size": {"shortest_edge": 56}}, "56 x 56"),
        ({"image_processor_type": "SiglipImageProcessor"}, "does not fit"),
    ],
)
def test_views_of_another_size_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE, "image_grid_pinpoints": PINPOINTS}
    with pytest.raises(ConfigError, match=message):
        processor(tmp_path, ONEVISION, given | config)


def test_low_detail_is_at_most_512_by_512_pixels(tmp_path: Path) -> None:
    ours = processor(tmp_path, QWEN, {"image_processor_type": "Qwen2VLImageProcessor"})
    oracle = Qwen2VLImageProcessorPil(max_pixels=512 * 512)
    pixels = noise(800, 1000)
    low, high, auto = (ours.prepare(picture(pixels), detail) for detail in ("low", "high", "auto"))
    wanted = oracle(pixels, return_tensors="np", input_data_format="channels_last")
    np.testing.assert_array_equal(values_of(low, times=2), wanted["pixel_values"])
    assert low.num_tokens < high.num_tokens == auto.num_tokens
    assert low.key != high.key == auto.key


def test_extreme_proportions_are_refused(tmp_path: Path) -> None:
    for media, name in ((QWEN, "Qwen2VLImageProcessor"), (tower("clip", 224), "CLIPImageProcessor")):
        with pytest.raises(MediaError, match="at most 200 times"):
            processor(tmp_path, media, {"image_processor_type": name}).prepare(picture(noise(1, 203)))


def test_a_line_does_not_become_a_square_of_any_size(tmp_path: Path) -> None:
    """Of 20 000 pixels 400 million would become."""
    config = {"image_processor_type": "LlavaImageProcessor", "do_pad": True, **edges(56, 56)}
    line = np.zeros((1, 20_000, 3), np.uint8)
    with pytest.raises(
        MediaError, match=r"20000 x 1 pixels; the square .* would have 400000000, more than the limit of"
    ):
        processor(tmp_path, tower("clip", 56), config).prepare(picture(line))


@pytest.mark.parametrize(
    ("media", "config", "message"),
    [
        (QWEN, {}, "has no preprocessor_config.json"),
        (QWEN, {"image_processor_type": "PixtralImageProcessor"}, "PixtralImageProcessor; supported: Qwen2VL"),
        (QWEN, {"image_processor_type": "CLIPImageProcessor"}, "does not fit"),
        (QWEN, {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16}, "patch_size is 16, but 14"),
        (QWEN, {"image_processor_type": "Qwen2VLImageProcessor", "size": {"height": 56}}, "malformed: .*shortest_edge"),
        (QWEN, {"image_processor_type": "Qwen2VLImageProcessor", "resample": 7}, "resample is 7"),
        (tower("clip", 336), {"image_processor_type": "CLIPImageProcessor"}, r"\(224, 224\), but .* 336 x 336"),
        (tower("clip", 224), {"image_processor_type": "CLIPImageProcessor", "do_resize": False}, "do_resize"),
        (tower("clip", 224), {"image_processor_type": "CLIPImageProcessor", "do_pad": True}, "do_pad"),
    ],
)
def test_what_cannot_be_done_exactly_is_refused_at_start(
    media: MediaConfig, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        processor(tmp_path, media, config)


def test_options_within_processor_config(tmp_path: Path) -> None:
    inner = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": {"shortest_edge": 784, "longest_edge": 7840}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inner}))
    options = read_image_options(tmp_path, QWEN)
    assert (options.min_pixels, options.max_pixels) == (784, 7840)


def test_keys_tell_apart_what_the_encoder_would_see_differently(tmp_path: Path) -> None:
    """The same bytes as 120 x 80 pixels and 80 x 120, another option, another pixel; and nothing else."""
    media = replace(QWEN)
    config = {"image_processor_type": "Qwen2VLImageProcessor"}
    ours = processor(tmp_path, media, config)
    pixels = noise(80, 120)
    changed = pixels.copy()
    changed[79, 119, 2] ^= 1
    others = [
        ours.prepare(picture(pixels.reshape(120, 80, 3))),
        ours.prepare(picture(changed)),
        processor(tmp_path, media, {**config, "max_pixels": 4000}).prepare(picture(pixels)),
        processor(tmp_path, media, {**config, "image_mean": [0.1, 0.2, 0.3]}).prepare(picture(pixels)),
    ]
    keys = [ours.prepare(picture(pixels)).key, *(each.key for each in others)]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)
    assert ours.prepare(picture(np.asfortranarray(pixels))).key == keys[0]
