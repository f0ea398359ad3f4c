"""What sets Qwen3-VL apart, against transformers in float32 on CPU. What it shares: test_media_decoder.py."""

import pytest
import torch

from tests.support.media_forward import MediaForward, MediaPrompt, Reference, prompt, random_image, random_video
from tests.support.model_loading import load_on_cpu, load_op_by_op, model_config
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.config.stages import share_layers
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.media_decoder import MediaDecoder

TOLERANCE = 1e-4
FOLDER = cached_tiny_media_model("qwen3_vl")


def media_config() -> MediaConfig:
    media = model_config(FOLDER).media
    assert media is not None
    return media


MEDIA = media_config()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(FOLDER, MEDIA)


@pytest.fixture(params=[load_on_cpu, load_op_by_op], ids=["fused", "op-by-op"])
def model(request: pytest.FixtureRequest) -> MediaDecoder:
    loaded = request.param(FOLDER)
    assert isinstance(loaded, MediaDecoder)
    return loaded


def film_prompt() -> MediaPrompt:
    """Two videos of different sizes, with text between their frames, and an image between them."""
    first = [random_video(MEDIA, (1, 4, 6), seed) for seed in range(3)]
    second = [random_video(MEDIA, (1, 6, 2), seed) for seed in (5, 6)]
    image = random_image(MEDIA, (1, 4, 4), 7)
    return prompt(MEDIA, [2, first[0], 3, first[1], 3, first[2], 4, image, 2, second[0], 3, second[1], 5], seed=1)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def test_frames_with_text_between_them_are_one_video(model: MediaDecoder, reference: Reference) -> None:
    text = film_prompt()
    logits = MediaForward(model, MEDIA, {"a": text}).step([("a", text.tokens)])["a"]
    expected = reference.logits(text)
    assert expected.std() > 0.5
    assert_close(logits, expected)


def test_positions_are_those_of_transformers(reference: Reference) -> None:
    text = film_prompt()
    places, delta = text.positions(MEDIA)
    expected, expected_delta = reference.positions(text)
    assert torch.equal(torch.from_numpy(places).long(), expected)
    assert delta == expected_delta


def test_chunks_through_a_video_and_the_tokens_after_it(model: MediaDecoder, reference: Reference) -> None:
    text = film_prompt()
    forward = MediaForward(model, MEDIA, {"a": text}, block_size=4)
    sizes = [min(5, len(text.tokens) - first) for first in range(0, len(text.tokens), 5)]
    pieces = [forward.step([forward.chunk("a", size)])["a"] for size in sizes]
    assert_close(torch.cat(pieces), reference.logits(text))
    chosen = [int(pieces[-1][-1].argmax())]
    for _ in range(5):
        chosen.append(int(forward.step([("a", chosen[-1:])])["a"][-1].argmax()))
    assert chosen == reference.greedy(text, 6)


def test_what_is_added_behind_the_first_layers_counts(model: MediaDecoder) -> None:
    """Also for the rows that are asked for alone."""
    text = film_prompt()
    forward = MediaForward(model, MEDIA, {"a": text})
    batch = forward.prepare([("a", text.tokens)])
    assert batch.media is not None
    rows = torch.tensor([len(text.tokens) - 1], dtype=torch.int32)
    with_all = model.forward(batch, forward.paged.kv_caches, rows).clone()
    whole = model.forward(batch, forward.paged.kv_caches)
    assert_close(whole[-1:], with_all)
    batch.media.rows[:, model.architecture.hidden_size :] = 0
    without = model.forward(batch, forward.paged.kv_caches, rows)
    assert (without - with_all).abs().max() > 0.1


def test_a_first_stage_needs_the_layers_that_images_are_added_behind() -> None:
    config = model_config(FOLDER)
    first, *_ = share_layers(config.architecture.num_layers, 3)
    with pytest.raises(ConfigError, match=r"leaves 1 of the model.s layers in the first stage"):
        MediaDecoder(config, torch.device("cpu"), stage=first)
