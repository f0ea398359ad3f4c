"""A vision encoder that several workers have between them, or each all of, against one worker's, in float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.media_forward import MediaForward, prompt, random_image
from tests.support.model_loading import CPU, load_on_cpu, load_part, model_config
from tests.support.thread_group import ThreadGroup, on_every_rank, thread_groups
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model, is_qwen, make_tiny_media_model
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.models.loader import build_model
from tokenmill_engine.models.media_decoder import MediaDecoder

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 10, 2))


def overrides(family: MediaFamily, num_heads: int, inner: int = 48) -> dict[str, Any]:
    """Heads of width 8; text with heads for two and three workers."""
    text = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    if not is_qwen(family):
        vision: dict[str, Any] = {"hidden_size": 8 * num_heads, "num_attention_heads": num_heads}
        return {"text_config": text, "vision_config": vision | {"intermediate_size": inner}}
    vision = {"num_heads": num_heads}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 8 * num_heads, "hidden_size": 96}
    else:
        vision |= {"hidden_size": 8 * num_heads, "out_hidden_size": 96, "intermediate_size": inner}
    return {"text_config": text, "vision_config": vision}


def check_rows(config: ModelConfig, size: int) -> None:
    """Every worker has nearly the rows of one with the whole encoder. One of them keeps the rows of an image, so they
    need not be the same to the last bit, nor are they: how threads share out a product depends on who else computes."""
    assert config.media is not None
    media = config.media
    images = [random_image(media, grid, seed) for seed, grid in enumerate(GRIDS)]
    whole = load_part(config, thread_groups(1)[0]).encode(images)
    outputs = on_every_rank(thread_groups(size), lambda group: load_part(config, group).encode(images))
    for output in outputs:
        for rows, expected in zip(output, whole, strict=True):
            torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", ["weights", "data"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_one_worker(family: MediaFamily, size: int, mode: EncoderMode) -> None:
    folder = cached_tiny_media_model(family, **overrides(family, num_heads=6))
    check_rows(model_config(folder, encoder_mode=mode), size)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_and_widths_need_not_divide(family: MediaFamily) -> None:
    folder = cached_tiny_media_model(family, **overrides(family, num_heads=4, inner=50))
    check_rows(model_config(folder), 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_those_of_one_worker(family: MediaFamily, tmp_path: Path) -> None:
    folder = make_tiny_media_model(tmp_path, family, **overrides(family, num_heads=4))
    (folder / "model.safetensors").unlink()
    check_rows(model_config(folder, load_format="dummy", seed=3), 2)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_each_worker_has_its_part_of_the_weights_or_all_of_them(family: MediaFamily) -> None:
    folder = cached_tiny_media_model(family, **overrides(family, num_heads=6))
    config = model_config(folder)

    def num_weights(config: ModelConfig, size: int) -> list[int]:
        models = on_every_rank(thread_groups(size), lambda group: build_model(config, CPU, group=group))
        encoders = [model.encoder for model in models if isinstance(model, MediaDecoder)]
        return [sum(target.view.numel() for _, target in encoder.targets()) for encoder in encoders if encoder]

    (everything,) = num_weights(config, 1)
    assert num_weights(replace(config, encoder_mode="data"), 3) == [everything] * 3
    parts = num_weights(config, 3)
    assert len(set(parts)) == 1
    assert parts[0] < 0.5 * everything


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_worker_whoever_has_the_rows(family: MediaFamily) -> None:
    folder = cached_tiny_media_model(family)
    config = model_config(folder)
    assert config.media is not None
    media = config.media
    text = prompt(media, [3, random_image(media, GRIDS[0], 0), 4, random_image(media, GRIDS[1], 1), 2])
    whole = load_on_cpu(folder)
    assert isinstance(whole, MediaDecoder)
    expected = MediaForward(whole, media, {"a": text}).step([("a", text.tokens)])["a"]
    for keeper in range(2):

        def run(group: ThreadGroup, keeper: int = keeper) -> torch.Tensor:
            forward = MediaForward(load_part(config, group), media, {"a": text}, has_rows=group.rank == keeper)
            return forward.step([("a", text.tokens)])["a"]

        for logits in on_every_rank(thread_groups(2), run):
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
