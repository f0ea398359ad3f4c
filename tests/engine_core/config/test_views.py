"""Sizes of views against transformers' own arithmetic, at every kind of proportions."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from tests.support.tiny_media_models import tiny_media_config
from tokenmill_engine.config.hf_media import parse_media
from tokenmill_engine.config.hf_views import pinpoints
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.errors import ConfigError

SIZES = pinpoints(None, "config.json")
VIEWS = ViewsConfig(SIZES, 9, 384, 27)


def some_sizes() -> list[tuple[int, int]]:
    rng = np.random.default_rng(0)
    sides = np.exp(rng.uniform(0, 8.5, (150, 2))).astype(int) + 1
    edges = [(384, 384), (1, 5000), (5000, 1), (768, 767), (1152, 384), (385, 1), (2304, 2304)]
    return [*edges, *((int(height), int(width)) for height, width in sides)]


def theirs() -> Any:
    processor = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    processor.num_image_tokens, processor.vision_aspect_ratio = 27**2, "anyres_max_9"
    processor.image_processor = type("Sizes", (), {"image_grid_pinpoints": [list(size) for size in SIZES]})()
    return processor


def test_views_and_rows_are_those_of_transformers() -> None:
    processor = theirs()
    for height, width in some_sizes():
        best = select_best_resolution((height, width), SIZES)
        assert VIEWS.best_size(height, width) == best
        assert VIEWS.num_tiles(height, width) == best[0] * best[1] // 384**2
        crop = VIEWS.crop(height, width)
        rows, columns = best[0] // 384 * 27, best[1] // 384 * 27
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
        kept = unpad_image(places, (height, width))
        assert kept.shape[1:] == (crop.rows, crop.columns)
        if kept.numel():
            assert kept[:, 0, 0].tolist() == [crop.top, crop.left]
        expected = processor._get_number_of_features(height, width, 384, 384)
        assert VIEWS.num_rows(1 + VIEWS.num_tiles(height, width), height, width) == expected


def test_one_view_has_one_line() -> None:
    assert VIEWS.num_rows(1, 20, 4000) == 27**2 + 1


def test_they_are_read_from_the_model() -> None:
    media = parse_media(tiny_media_config("llava_onevision"), "config.json")
    assert media is not None
    assert media.views is not None
    assert (media.kind, media.views.max_views, media.views.view_size, media.views.side) == ("llava_onevision", 2, 24, 3)
    assert media.views.sizes[:3] == ((24, 24), (24, 48), (24, 72))
    assert media.vision.feature_layers == (3,)
    assert not media.vision.drops_first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_aspect_ratio": "pad"}, "vision_aspect_ratio 'pad'"),
        ({"vision_aspect_ratio": "anyres_max_0"}, "only anyres_max_N"),
        ({"image_grid_pinpoints": [[24, 25]]}, "multiples of the tower's 24"),
        ({"image_grid_pinpoints": []}, "multiples"),
        ({"image_grid_pinpoints": [[24, 24, 24]]}, "pairs"),
        ({"image_grid_pinpoints": "all"}, "malformed"),
        ({"vision_feature_select_strategy": "default"}, "8 states .* 'full' for siglip"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_media(tiny_media_config("llava_onevision", **changes), "config.json")
