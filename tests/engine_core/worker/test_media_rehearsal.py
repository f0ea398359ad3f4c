"""Made-up images of the start."""

from dataclasses import replace

import pytest

from tests.engine_core.worker.conftest import tiny_engine_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal
from tokenmill_engine.worker.worker import Worker

ROW_COUNTS = (1, 8, 16, 32, 64)


def rehearsal_of(family: MediaFamily, *, num_workers: int = 1, mode: EncoderMode = "weights") -> MediaRehearsal:
    """Of the tiny models prompts are shorter than what may be encoded at once."""
    scheduler = SchedulerConfig(max_num_encoder_tokens=6000, encoder_cache_tokens=8000)
    config = tiny_engine_config(folder=cached_tiny_media_model(family), scheduler=scheduler, encoder_mode=mode)
    assert config.model.media is not None
    return MediaRehearsal(replace(config, parallel=ParallelConfig(num_workers)), config.model.media, 1)


def check_near(num_rows: list[int]) -> None:
    """Each of `ROW_COUNTS` is met by more than half of it, so that no smaller kernel would do."""
    for count in ROW_COUNTS:
        assert count < min(num_rows) or any(count / 2 < rows <= count for rows in num_rows), (count, num_rows)


@pytest.mark.parametrize(
    ("family", "rows_of_image"), [("llava", 9), ("llava", 10), ("llava_siglip", 9), ("llava_onevision", 9)]
)
def test_images_of_one_size_are_batched_for_every_number_of_rows(family: MediaFamily, rows_of_image: int) -> None:
    """CLIP sees a class token beside the 9 patches of each."""
    batches = rehearsal_of(family).batches(ROW_COUNTS)
    check_near([len(batch) * rows_of_image for batch in batches])
    for batch in batches:
        assert len({image.entry for image in batch}) == len(batch)


@pytest.mark.parametrize("rows_of_token", [1, 4])
def test_images_of_any_size_have_every_number_of_rows(rows_of_token: int) -> None:
    """Patches, and what squares of them become."""
    batches = rehearsal_of("qwen2_vl").batches(ROW_COUNTS)
    check_near([sum(image.num_tokens for image in batch) * rows_of_token for batch in batches])


@pytest.mark.parametrize(
    ("num_workers", "mode", "most"), [(1, "weights", 4096), (2, "weights", 4096), (2, "data", 6000)]
)
def test_the_largest_step_encodes_as_much_as_one_can(num_workers: int, mode: EncoderMode, most: int) -> None:
    """For several requests: more than the prompt of one can hold. Workers that share the images have a batch each."""
    plan = rehearsal_of("llava", num_workers=num_workers, mode=mode).largest()
    assert plan.media is not None
    num_tokens = sum(image.num_tokens for image in plan.media.encode)
    assert most - 9 < num_tokens <= most


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_worker_has_encoded_an_image_before_the_first_request(
    family: MediaFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And keeps nothing of it."""
    encode, encoded = MediaDecoder.encode, list[list[ImageInput]]()

    def watched(model: MediaDecoder, images: list[ImageInput]) -> object:
        encoded.append(images)
        return encode(model, images)

    monkeypatch.setattr(MediaDecoder, "encode", watched)
    worker = Worker(tiny_engine_config(folder=cached_tiny_media_model(family)))
    worker.initialize()
    assert len(encoded) == 1
    media = worker._runner._device.media  # type: ignore[union-attr]
    assert media.outputs.num_tokens == 0
    worker.close()
