"""Logits and encoder outputs of models that look at images against transformers, in float32 on CPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.media_forward import MediaForward, MediaPrompt, Reference, num_placeholders, prompt, random_image
from tests.support.model_loading import load_on_cpu, load_op_by_op, model_config
from tests.support.tiny_media_models import MediaFamily, Spelling, cached_tiny_media_model
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.models.loader import build_model
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.encoder import ImageInput

TOLERANCE = 1e-4

CASES: dict[str, tuple[MediaFamily, Spelling, dict[str, Any]]] = {
    "llava": ("llava", "new", {}),
    "llava-old-names": ("llava", "old", {}),
    "llava-two-layers-full": (
        "llava",
        "new",
        {"vision_feature_layer": [0, -1], "vision_feature_select_strategy": "full"},
    ),
    "llava-tied": ("llava", "new", {"text_config": {"tie_word_embeddings": True}}),
    "llava-siglip": ("llava_siglip", "old", {"vision_feature_select_strategy": "full"}),
    "llava-siglip-cut-off": (
        "llava_siglip",
        "new",
        {"vision_feature_layer": -1, "vision_config": {"image_size": 24, "patch_size": 7}},
    ),
    "llava-qwen2": ("llava", "old", {"text_config": {"model_type": "qwen2"}}),
    "onevision": ("llava_onevision", "new", {}),
    "onevision-old-names": ("llava_onevision", "old", {"vision_aspect_ratio": "anyres_max_9"}),
    "qwen2-vl": ("qwen2_vl", "new", {}),
    "qwen2-vl-tied": ("qwen2_vl", "old", {"text_config": {"tie_word_embeddings": True}}),
    "qwen2-vl-old-names": ("qwen2_vl", "old", {}),
    "qwen2.5-vl": ("qwen2_5_vl", "new", {}),
    "qwen2.5-vl-old-names": ("qwen2_5_vl", "old", {}),
    "qwen3-vl": ("qwen3_vl", "new", {}),
    "qwen3-vl-tied": ("qwen3_vl", "new", {"text_config": {"tie_word_embeddings": True, "num_attention_heads": 2}}),
    "qwen3-vl-no-deepstack": ("qwen3_vl", "new", {"vision_config": {"deepstack_visual_indexes": []}}),
    "qwen2.5-vl-wide-windows": (
        "qwen2_5_vl",
        "new",
        {"vision_config": {"window_size": 24, "fullatt_block_indexes": [0, 2]}},
    ),
}
GRIDS = ((1, 4, 6), (1, 10, 2), (1, 6, 6), (1, 2, 2))


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Beside the library's threads torch's own only get in the way, as in a worker."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Subject:
    """One model, ours and theirs."""

    def __init__(self, folder: Path) -> None:
        media = model_config(folder).media
        assert media is not None
        self.folder, self.media = folder, media
        self.reference = Reference(folder, media)

    def images(self, *grids: tuple[int, int, int]) -> list[ImageInput]:
        return [random_image(self.media, grid, seed) for seed, grid in enumerate(grids)]


@pytest.fixture(params=CASES, scope="module")
def subject(request: pytest.FixtureRequest) -> Subject:
    family, spelling, overrides = CASES[request.param]
    return Subject(cached_tiny_media_model(family, spelling=spelling, **overrides))


Load = Callable[[Path], MediaDecoder]


def _loaded(loader: Callable[..., Any]) -> Load:
    def load(folder: Path) -> MediaDecoder:
        model = loader(folder)
        assert isinstance(model, MediaDecoder)
        return model

    return load


@pytest.fixture(params=[load_on_cpu, load_op_by_op], ids=["fused", "op-by-op"])
def load(request: pytest.FixtureRequest) -> Load:
    """Both ways to run the layers."""
    return _loaded(request.param)


load_fused = _loaded(load_on_cpu)


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=TOLERANCE, rtol=TOLERANCE)


def everything(text: MediaPrompt) -> list[tuple[str, list[int]]]:
    return [("a", text.tokens)]


def test_images_of_several_sizes_are_encoded_together(subject: Subject) -> None:
    images = subject.images(*GRIDS)
    model = load_fused(subject.folder)
    together, theirs = model.encode(images), subject.reference.encode(images)
    for image, ours, expected in zip(images, together, theirs, strict=True):
        assert ours.shape == (num_placeholders(subject.media, image), subject.media.vision.row_size)
        assert expected.std() > 0.3
        assert_close(ours, expected)
        assert_close(model.encode([image])[0], expected)
    assert model.encode([]) == []


def test_one_image_equals_transformers(subject: Subject, load: Load) -> None:
    (image,) = subject.images(GRIDS[0])
    text = prompt(subject.media, [7, image, 11])
    logits = MediaForward(load(subject.folder), subject.media, {"a": text}).step(everything(text))["a"]
    expected = subject.reference.logits(text)
    assert expected.std() > 0.5
    assert_close(logits, expected)


def test_images_of_several_sizes_with_text_between_equal_transformers(subject: Subject, load: Load) -> None:
    first, second, third, fourth = subject.images(*GRIDS)
    text = prompt(subject.media, [3, first, 5, second, 2, third, 1, fourth], seed=1)
    logits = MediaForward(load(subject.folder), subject.media, {"a": text}).step(everything(text))["a"]
    assert_close(logits, subject.reference.logits(text))


def test_chunks_through_an_image_beside_other_requests_and_the_tokens_after_it(subject: Subject, load: Load) -> None:
    first, second, third, _ = subject.images(*GRIDS)
    prompts = {
        "a": prompt(subject.media, [2, first, 4, second, 6], seed=2),
        "b": prompt(subject.media, [15], seed=3),
        "c": prompt(subject.media, [third, 3], seed=4),
    }
    forward = MediaForward(load(subject.folder), subject.media, prompts, block_size=4)
    left = {name: len(text.tokens) for name, text in prompts.items()}
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    sizes = {"a": 5, "b": 1, "c": 3}
    while any(left.values()):
        counts = {name: min(sizes[name], left[name]) for name in prompts if left[name]}
        for name, logits in forward.step([forward.chunk(name, count) for name, count in counts.items()]).items():
            pieces[name].append(logits)
            left[name] -= len(logits)
    for name, text in prompts.items():
        assert_close(torch.cat(pieces[name]), subject.reference.logits(text))
    chosen: dict[str, list[int]] = {name: [int(pieces[name][-1][-1].argmax())] for name in prompts}
    for _ in range(5):
        for name, logits in forward.step([(name, chosen[name][-1:]) for name in prompts]).items():
            chosen[name].append(int(logits[-1].argmax()))
    for name, text in prompts.items():
        assert chosen[name] == subject.reference.greedy(text, 6)


def test_a_prompt_that_begins_with_the_same_image_goes_on_behind_it(subject: Subject) -> None:
    (image, other, *_) = subject.images(*GRIDS)
    shared, tail = prompt(subject.media, [2, image, 9], seed=5), prompt(subject.media, [other, 4], seed=6)
    offset = len(shared.tokens)
    longer = MediaPrompt(
        shared.tokens + tail.tokens, shared.images + [(offset + at, image) for at, image in tail.images]
    )
    forward = MediaForward(load_fused(subject.folder), subject.media, {"a": shared, "b": longer}, block_size=4)
    forward.step([("a", shared.tokens)])
    num_shared = offset // 4 * 4
    forward.paged.share("a", "b", num_shared)
    forward.done["b"] = num_shared
    logits = forward.step([forward.chunk("b", len(longer.tokens) - num_shared)])["b"]
    assert_close(logits, subject.reference.logits(longer)[num_shared:])


def test_two_images_swapped_give_other_logits(subject: Subject) -> None:
    first, second = subject.images(GRIDS[2], GRIDS[2])
    results = []
    for images in ((first, second), (second, first)):
        text = prompt(subject.media, [3, images[0], 2, images[1], 5], seed=7)
        logits = MediaForward(load_fused(subject.folder), subject.media, {"a": text}).step(everything(text))["a"]
        assert_close(logits, subject.reference.logits(text))
        results.append(logits)
    assert (results[0][-5:] - results[1][-5:]).abs().max() > 0.1


def test_text_alone_equals_transformers(subject: Subject) -> None:
    text = prompt(subject.media, [40], seed=8)
    model = load_fused(subject.folder)
    assert model.is_fused
    forward = MediaForward(model, subject.media, {"a": text})
    assert_close(forward.step(everything(text))["a"], subject.reference.logits(text))


@pytest.mark.parametrize("subject", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"], indirect=True)
def test_positions_are_those_of_transformers(subject: Subject) -> None:
    first, second, third, fourth = subject.images(*GRIDS)
    for parts in ([5, first, 2, second, 1, third, 7], [fourth, 3], [second], [6]):
        text = prompt(subject.media, parts)
        places, delta = text.positions(subject.media)
        expected, expected_delta = subject.reference.positions(text)
        assert torch.equal(torch.from_numpy(places).long(), expected)
        assert delta == expected_delta


def test_wrong_pixels_are_refused(subject: Subject) -> None:
    (image,) = subject.images(GRIDS[0])
    model = load_fused(subject.folder)
    with pytest.raises(ValueError, match="pixels"):
        model.encode([ImageInput(image.pixel_values[:, :-1], image.grid)])
    if subject.media.kind == "qwen2_vl":
        with pytest.raises(ValueError, match="grid"):
            model.encode([ImageInput(image.pixel_values, (1, 3, 8))])
        with pytest.raises(ValueError, match="grid"):
            model.encode([ImageInput(image.pixel_values)])


def test_bfloat16_stays_near_float32() -> None:
    for family in ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        folder = cached_tiny_media_model(family)
        media = model_config(folder).media
        assert isinstance(media, MediaConfig)
        image = random_image(media, GRIDS[2], 0)
        exact, rounded = load_on_cpu(folder), load_on_cpu(folder, dtype="bfloat16")
        assert isinstance(exact, MediaDecoder)
        assert isinstance(rounded, MediaDecoder)
        (ours,), (expected,) = rounded.encode([image]), exact.encode([image])
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - expected).abs().mean() < 0.05
        text = prompt(media, [4, image, 6])
        logits = MediaForward(rounded, media, {"a": text}).step(everything(text))["a"]
        reference = MediaForward(exact, media, {"a": text}).step(everything(text))["a"]
        assert (logits.log_softmax(-1) - reference.log_softmax(-1)).abs().mean() < 0.1


@pytest.mark.parametrize(("family", "expected"), [("qwen2_vl", [100, 300, 2000]), ("qwen2_5_vl", [400, 1024, 2000])])
def test_positions_go_as_far_as_the_model_was_made_for_or_as_tokens_need(
    family: MediaFamily, expected: list[int]
) -> None:
    """A video takes up to four times its tokens of Qwen2.5-VL. These models were made for 1024."""
    configs = [model_config(cached_tiny_media_model(family), max_model_len=length) for length in (100, 300, 2000)]
    assert [config.num_positions for config in configs] == expected
    rows = [len(build_model(config, torch.device("meta")).cos_sin) for config in configs]
    assert [count - each for count, each in zip(rows, expected, strict=True)] == [64] * 3
