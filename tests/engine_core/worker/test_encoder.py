"""Encoder outputs of a worker, by entry, and the rows that a batch gets from them."""

import dataclasses
import logging
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.engine_core.worker.conftest import BLOCK_SIZE, tiny_engine_config
from tests.support.failing_group import FailingGroup, failing_groups
from tests.support.media_forward import random_image, tensors_of
from tests.support.media_items import VALUES, array_of, make_pixels, tensor_of, with_values
from tests.support.model_loading import load_on_cpu, load_part, model_config
from tests.support.server import PATIENCE_S
from tests.support.shared_media import key_of, segment
from tests.support.thread_group import on_every_rank, thread_groups
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.attention.batch import MediaRows
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_engine.ipc.shared_objects import SharedObjects
from tokenmill_engine.messages import MediaTensor
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.outputs import EncoderInput, PlaceholderRows, StepMedia
from tokenmill_engine.worker.encoder import EncoderOutputs, as_tensor, batches
from tokenmill_engine.worker.encoder_shares import EncoderShare
from tokenmill_engine.worker.inputs import MissingRows
from tokenmill_engine.worker.media_links import MediaLinks
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan
from tokenmill_engine.worker.worker import Worker

FOLDER = cached_tiny_media_model("qwen2_vl")
GRID = (1, 4, 6)


@pytest.fixture(scope="module")
def model() -> MediaDecoder:
    loaded = load_on_cpu(FOLDER)
    assert isinstance(loaded, MediaDecoder)
    return loaded


def image(entry: int, seed: int = 0, pixels: MediaTensor | None = None) -> EncoderInput:
    media = model_config(FOLDER).media
    assert media is not None
    tensors = tensors_of(random_image(media, GRID, seed)) if pixels is None else with_values(pixels)
    return EncoderInput(entry, "image", 6, GRID, tensors)


def test_bytes_become_numbers() -> None:
    for tensor in (make_pixels((3, 4, 5), seed=1), tensor_of(VALUES)):
        numbers = as_tensor(tensor).numpy()
        assert numbers.dtype == tensor.dtype
        assert (numbers == array_of(tensor)).all()


def test_rows_come_from_where_the_plan_says(model: MediaDecoder) -> None:
    outputs = EncoderOutputs(model, EncoderShare())
    duration = outputs.apply(StepMedia([], [image(5, 1), image(6, 2)], []))
    assert duration is not None
    assert duration.seconds() > 0.0
    places = [PlaceholderRows(0, 2, 4, 6, 0), PlaceholderRows(2, 0, 3, 5, 3)]
    rows, missing = outputs.gather(places, np.array([0, 7, 8, 12], np.int32))
    assert rows.tokens.tolist() == [2, 3, 4, 5, 8, 9, 10]
    media = model_config(FOLDER).media
    assert media is not None
    first, second = (model.encode([random_image(media, GRID, seed)])[0] for seed in (1, 2))
    assert torch.equal(rows.rows, torch.cat([second[:4], first[3:]]))
    assert not missing.rows


def test_what_is_freed_is_gone_and_missed_by_its_rows_alone(model: MediaDecoder) -> None:
    outputs = EncoderOutputs(model, EncoderShare())
    outputs.apply(StepMedia([], [image(1), image(2)], []))
    assert outputs.num_tokens == 12
    assert outputs.apply(StepMedia([1, 77], [], [])) is None
    assert outputs.num_tokens == 6
    places = [PlaceholderRows(0, 0, 6, 1, 0), PlaceholderRows(1, 0, 6, 2, 0)]
    rows, missing = outputs.gather(places, np.array([0, 6, 12], np.int32))
    assert rows.tokens.tolist() == list(range(6, 12))
    assert (missing.rows, missing.entries) == ({0}, {1})


@pytest.mark.parametrize("shape", [(24, 5), (20, 48)])
def test_what_cannot_be_encoded_is_missing(
    model: MediaDecoder, shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    outputs = EncoderOutputs(model, EncoderShare())
    with caplog.at_level(logging.ERROR):
        outputs.apply(StepMedia([], [image(1, pixels=make_pixels(shape)), image(2)], []))
    assert "could not be encoded" in caplog.text
    rows, missing = outputs.gather([PlaceholderRows(0, 0, 6, 1, 0)], np.array([0, 6], np.int32))
    assert len(rows.tokens) == len(rows.rows) == 0
    assert missing.entries == {1}
    assert outputs.num_tokens == 6


def test_rows_are_with_one_of_several_workers_and_zeros_on_the_others(model: MediaDecoder) -> None:
    workers = [EncoderOutputs(model, EncoderShare(group, "data")) for group in thread_groups(2)]
    plan = StepMedia([], [image(4, 1), image(5, 2), image(6, pixels=make_pixels((24, 5)))], [])
    places = [PlaceholderRows(0, 1, 3, 4, 1), PlaceholderRows(1, 0, 6, 5, 0), PlaceholderRows(2, 0, 2, 6, 0)]
    gathered = []
    for outputs in workers:
        outputs.apply(plan)
        gathered.append(outputs.gather(places[:2], np.array([0, 6, 12, 14], np.int32)))
        assert not gathered[-1][1].rows
    first, second = (rows for rows, _ in gathered)
    assert first.tokens.tolist() == second.tokens.tolist() == [1, 2, 3, *range(6, 12)]
    assert [outputs.num_tokens for outputs in workers] == [6, 6]
    alone = EncoderOutputs(model, EncoderShare())
    alone.apply(plan)
    assert torch.equal(first.rows + second.rows, alone.gather(places[:2], np.array([0, 6, 12, 14], np.int32))[0].rows)
    missing = [outputs.gather(places, np.array([0, 6, 12, 14], np.int32))[1].rows for outputs in workers]
    assert sorted(map(len, missing)) == [0, 1]
    for outputs in workers:
        outputs.apply(StepMedia([4, 5, 6], [], []))
        assert outputs.num_tokens == 0
        assert outputs.gather(places, np.array([0, 6, 12, 14], np.int32))[1].rows == {0, 1, 2}


def shared_image(entry: int, store: ObjectStore) -> EncoderInput:
    brought = image(entry, seed=entry)
    lease = store.put(key_of(entry), brought.tensors)
    assert lease is not None
    return dataclasses.replace(brought, tensors=lease.tensors, key=lease.key, shared=lease.shared)


def test_pixels_come_from_shared_memory(model: MediaDecoder) -> None:
    with segment(16) as memory:
        links, store = MediaLinks(SharedObjects((memory,))), ObjectStore(memory, 0, 1 << 30)
        outputs, expected = EncoderOutputs(model, EncoderShare(), links), EncoderOutputs(model, EncoderShare())
        outputs.apply(StepMedia([], [shared_image(entry, store) for entry in (1, 2)], []))
    expected.apply(StepMedia([], [image(entry, seed=entry) for entry in (1, 2)], []))
    places, query_start = [PlaceholderRows(0, 6 * row, 6, 1 + row, 0) for row in range(2)], np.array([0, 12], np.int32)
    assert torch.equal(outputs.gather(places, query_start)[0].rows, expected.gather(places, query_start)[0].rows)


@pytest.mark.parametrize("mode", ["weights", "data"])
def test_what_one_worker_does_not_find_in_shared_memory_is_missed(model: MediaDecoder, mode: EncoderMode) -> None:
    """Rank 0 looks in time, rank 1 too late. Neither waits for the other, and no half of an image is used."""
    places, query_start = [PlaceholderRows(row, 0, 6, 4 + row, 0) for row in range(2)], np.array([0, 6, 12], np.int32)
    with segment(16) as memory:
        store = ObjectStore(memory, 0, 1 << 30)
        plan = StepMedia([], [shared_image(entry, store) for entry in (4, 5)], [])
        links = MediaLinks(SharedObjects((memory,))), MediaLinks()
        ranks = [
            EncoderOutputs(model, EncoderShare(group, mode), link)
            for group, link in zip(thread_groups(2), links, strict=True)
        ]
        threads = [threading.Thread(target=rank.apply, args=(plan,), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    missed = [rank.gather(places, query_start)[1].entries for rank in ranks]
    # Image 4 is rank 0's.
    assert missed == ([{4}, {5}] if mode == "weights" else [set(), {5}])
    assert [rank.num_tokens for rank in ranks] == ([0, 0] if mode == "weights" else [6, 0])


def test_a_step_goes_on_without_the_rows_whose_images_are_missing() -> None:
    """Row 1 looks at an entry that never was."""
    worker = Worker(tiny_engine_config(folder=FOLDER))
    worker.initialize()
    alone = rehearsal_plan(1, 8, 1, BLOCK_SIZE, GREEDY)
    expected = worker.execute(alone).wait()
    plan = rehearsal_plan(2, 8, 1, BLOCK_SIZE, GREEDY)
    starts = [plan.starts[0], dataclasses.replace(plan.starts[1], block_ids=([1],))]
    media = StepMedia([], [], [PlaceholderRows(1, 1, 6, 7, 0)])
    result = worker.execute(dataclasses.replace(plan, starts=starts, media=media)).wait()
    assert result.errors == {1: "an image of this request could not be encoded"}
    assert result.lost_entries == (7,)
    assert result.num_new.tolist() == [1, 0]
    assert result.token_ids[0].tolist() == expected.token_ids[0].tolist()
    worker.close()


def test_images_are_encoded_together_and_apart_where_one_fails(
    model: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has memory of its own, which does not outlive it."""
    encode, sizes = MediaDecoder.encode, list[int]()

    def fails_with_the_third(model: MediaDecoder, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        sizes.append(len(images))
        if any(torch.equal(each.pixel_values, bad.pixel_values) for each in images):
            raise RuntimeError("out of memory")
        return encode(model, images)

    third = image(3, 3)
    bad = model.ready(as_input(third))
    monkeypatch.setattr(MediaDecoder, "encode", fails_with_the_third)
    outputs = EncoderOutputs(model, EncoderShare())
    outputs.apply(StepMedia([], [image(1, 1), image(2, 2)], []))
    outputs.apply(StepMedia([], [image(4, 4), third, image(5, 5)], []))
    assert sizes == [2, 3, 1, 1, 1]
    assert outputs._outputs.keys() == {1, 2, 4, 5}
    for entry, rows in outputs._outputs.items():
        assert rows.untyped_storage().nbytes() == rows.nbytes
        expected = encode(model, [model.ready(as_input(image(entry, entry)))])[0]
        torch.testing.assert_close(rows, expected)


def test_an_image_that_one_of_several_workers_cannot_encode_is_missed_by_all_and_alone() -> None:
    """They have the encoder between them. Rank 1 fails with three images together, and then with the second one."""
    groups = failing_groups(2)
    config = model_config(FOLDER)
    models = on_every_rank(groups, lambda group: load_part(config, group))
    assert config.media is not None
    alone = random_image(config.media, GRID, 1)
    single = on_every_rank(groups, lambda group: models[group.rank].encode([alone]))[0]
    num_sums = len(groups[0].shapes)
    for number in (1, 2 * num_sums + 3):
        groups[1].fail_at(number)
    plan = StepMedia([], [image(entry, entry) for entry in (1, 2, 3)], [])
    places = [PlaceholderRows(row, 0, 6, 1 + row, 0) for row in range(3)]

    def encode(group: FailingGroup) -> tuple[MediaRows, MissingRows]:
        outputs = EncoderOutputs(models[group.rank], EncoderShare(group, "weights"))
        outputs.apply(plan)
        return outputs.gather(places, np.array([0, 6, 12, 18], np.int32))

    (first, first_missing), (second, second_missing) = on_every_rank(groups, encode)
    assert len(groups[0].shapes) == (1 + 1 + 3) * num_sums
    # Entry 2 is rank 0's to keep, which tells of it; the others are rank 1's.
    assert (first_missing.rows, first_missing.entries, second_missing.rows) == ({1}, {2}, set())
    assert first.tokens.tolist() == [*range(6), *range(12, 18)]
    torch.testing.assert_close(second.rows[:6], single[0])
    assert not first.rows.any()


def as_input(image: EncoderInput) -> ImageInput:
    return ImageInput(as_tensor(image.tensors["pixel_values"]), image.grid, as_tensor(image.tensors["values"]))


def test_batches_have_a_limit_and_large_images_their_own() -> None:
    sizes = [3000, 1000, 200, 9000, 5, 4091, 1]
    images = [dataclasses.replace(image(entry), num_tokens=size) for entry, size in enumerate(sizes)]
    assert [[each.num_tokens for each in batch] for batch in batches(images)] == [
        [3000, 1000],
        [200],
        [9000],
        [5, 4091],
        [1],
    ]
    assert list(batches([])) == []
