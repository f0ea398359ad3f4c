"""Workers that have a vision encoder between them, one of which fails in the middle: the others are not left waiting,
and the next images are encoded as ever."""

from collections.abc import Sequence

import pytest
import torch

from tests.support.failing_group import FailingGroup, failing_groups
from tests.support.media_forward import random_image, random_video
from tests.support.model_loading import load_part, model_config
from tests.support.thread_group import on_every_rank
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import EngineDeadError, ExchangeError
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.models.vision.joint import EncodingError

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 10, 2))


def parts_of(family: MediaFamily, groups: Sequence[FailingGroup]) -> tuple[ModelConfig, list[MediaDecoder]]:
    config = model_config(cached_tiny_media_model(family))
    return config, on_every_rank(groups, lambda group: load_part(config, group))


def images_of(family: MediaFamily, media: MediaConfig) -> list[ImageInput]:
    """Images, and a video where the model takes it; of views more than are computed at once."""
    images = [random_image(media, grid, seed) for seed, grid in enumerate(GRIDS)]
    if not media.takes_video:
        return images
    size = media.views.view_size if media.views is not None else 4
    return [*images, random_video(media, (15 if media.views is not None else 2, size, size), 3)]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_an_encoder_says_that_it_adds_up_is_what_it_adds_up(family: MediaFamily) -> None:
    groups = failing_groups(2)
    config, models = parts_of(family, groups)
    assert config.media is not None
    images = images_of(family, config.media)
    for batch in (images, images[:1]):
        for group in groups:
            group.shapes.clear()
        on_every_rank(groups, lambda group, batch=batch: models[group.rank].encode(batch))  # type: ignore[misc]
        for group, model in zip(groups, models, strict=True):
            assert model.encoder is not None
            assert list(model.encoder.sums(batch)) == group.shapes != []


@pytest.mark.parametrize("family", FAMILIES)
def test_who_fails_before_any_of_the_sums_leaves_nobody_waiting(family: MediaFamily) -> None:
    groups = failing_groups(2)
    config, models = parts_of(family, groups)
    assert config.media is not None
    images = images_of(family, config.media)[:2]

    def encode(group: FailingGroup) -> list[torch.Tensor] | str:
        try:
            return models[group.rank].encode(images)
        except EncodingError as error:
            return str(error)

    expected = on_every_rank(groups, encode)
    for number in range(len(groups[1].shapes)):
        groups[1].fail_at(number)
        assert on_every_rank(groups, encode)[1] == "RuntimeError: out of memory"
        for rows, wanted in zip(on_every_rank(groups, encode), expected, strict=True):
            for each, other in zip(rows, wanted, strict=True):
                assert isinstance(each, torch.Tensor)
                torch.testing.assert_close(each, other)


def test_all_may_fail_at_different_sums() -> None:
    groups = failing_groups(2)
    config, models = parts_of("qwen2_5_vl", groups)
    assert config.media is not None
    images = [random_image(config.media, GRIDS[0], 0)]
    for group in groups:
        group.fail_at(group.rank)

    def encode(group: FailingGroup) -> None:
        with pytest.raises(EncodingError, match="out of memory"):
            models[group.rank].encode(images)

    on_every_rank(groups, encode)
    assert len({len(group.shapes) for group in groups}) == 1


def test_images_that_do_not_fit_are_refused_by_all_alike_before_any_sum() -> None:
    groups = failing_groups(2)
    config, models = parts_of("qwen2_vl", groups)
    assert config.media is not None
    pixels = random_image(config.media, GRIDS[0], 0).pixel_values

    def encode(group: FailingGroup) -> None:
        with pytest.raises(ValueError, match="grid"):
            models[group.rank].encode([ImageInput(pixels, (1, 3, 6))])

    on_every_rank(groups, encode)
    assert [group.shapes for group in groups] == [[], []]


def test_a_lost_connection_is_not_an_encoder_that_failed() -> None:
    groups = failing_groups(2)
    config, models = parts_of("qwen2_vl", groups)
    assert config.media is not None
    image = random_image(config.media, GRIDS[0], 0)
    groups[0].fail_at(1, ExchangeError("worker 0 lost the connection to another worker"))
    with pytest.raises(ExchangeError):
        on_every_rank(groups, lambda group: models[group.rank].encode([image]))


def test_who_has_no_memory_for_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the others cannot be helped any more."""
    (group, other) = failing_groups(2)
    config, models = parts_of("qwen2_vl", (group, other))
    assert config.media is not None
    image = random_image(config.media, GRIDS[0], 0)

    def full(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("tokenmill_engine.models.vision.joint.torch.zeros", full)
    group.fail_at(0)
    with pytest.raises(EngineDeadError, match="an encoder failed in the middle of its sums: RuntimeError: out of mem"):
        models[0].encode([image])
