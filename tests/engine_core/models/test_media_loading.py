"""Checkpoints of models that look at images: every spelling of names, what is missing, what nobody needs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.support.media_forward import MediaForward, MediaPrompt, prompt, random_image
from tests.support.model_loading import CPU, load_on_cpu, loaded_weights, model_config
from tests.support.paged_forward import PagedForward
from tests.support.tiny_media_models import MediaFamily, Spelling, cached_tiny_media_model, make_tiny_media_model
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.vision.spelling import decoder_name, own_name

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def media_of(folder: Path) -> MediaConfig:
    media = model_config(folder).media
    assert media is not None
    return media


def some_prompt(media: MediaConfig) -> MediaPrompt:
    return prompt(media, [3, random_image(media, (1, 4, 6), 0), 4, random_image(media, (1, 2, 2), 1), 2])


def logits_of(model: object, media: MediaConfig) -> torch.Tensor:
    assert isinstance(model, MediaDecoder)
    text = some_prompt(media)
    return MediaForward(model, media, {"a": text}).step([("a", text.tokens)])["a"]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("visual.blocks.1.norm1.weight", "visual.blocks.1.norm1.weight"),
        ("model.visual.merger.ln_q.weight", "visual.merger.ln_q.weight"),
        ("vision_tower.vision_model.pre_layrnorm.bias", "visual.pre_layrnorm.bias"),
        ("model.vision_tower.embeddings.class_embedding", "visual.embeddings.class_embedding"),
        ("model.vision_tower.vision_model.encoder.layers.1.mlp.fc1.bias", "visual.encoder.layers.1.mlp.fc1.bias"),
        ("vision_tower.vision_model.encoder.layers.2.mlp.fc1.bias", None),
        ("vision_tower.vision_model.post_layernorm.weight", None),
        ("vision_tower.vision_model.embeddings.position_ids", None),
        ("model.vision_tower.vision_model.head.probe", None),
        ("visual.rotary_pos_emb.inv_freq", None),
        ("multi_modal_projector.linear_1.bias", "multi_modal_projector.linear_1.bias"),
        ("model.multi_modal_projector.linear_1.bias", "multi_modal_projector.linear_1.bias"),
    ],
)
def test_names_of_old_and_new_checkpoints(name: str, ours: str | None) -> None:
    assert own_name(name, num_tower_layers=2) == ours


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_that_is_used_arrives_unchanged(family: MediaFamily, spelling: Spelling) -> None:
    folder = cached_tiny_media_model(family, spelling=spelling)
    vision = media_of(folder).vision
    targets = loaded_weights(folder, CPU)
    used = set()
    for name, values in load_file(folder / "model.safetensors").items():
        ours = own_name(name, max(vision.feature_layers, default=None))
        if ours is not None:
            np.testing.assert_array_equal(targets[ours].numpy(), values, err_msg=name)
            used.add(ours)
    assert used == set(targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_saved_in_shards_loads_the_same(family: MediaFamily, tmp_path: Path) -> None:
    import transformers

    folder = cached_tiny_media_model(family)
    transformers.AutoModelForImageTextToText.from_pretrained(folder).save_pretrained(tmp_path, max_shard_size="60KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    media = media_of(tmp_path)
    assert media == media_of(folder)
    torch.testing.assert_close(
        logits_of(load_on_cpu(tmp_path), media), logits_of(load_on_cpu(folder), media), atol=0, rtol=0
    )


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_missing_unexpected_and_misshapen_tensors_are_named(family: MediaFamily, tmp_path: Path) -> None:
    folder = make_tiny_media_model(tmp_path, family)
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "patch_embed" in name)
    own = own_name(name, None)
    assert own is not None
    for change, message in (
        ({"model.visual.stranger.weight": np.zeros(2, np.float32)}, "visual.stranger.weight"),
        ({name: np.zeros((2, 2), np.float32)}, name),
    ):
        save_file(weights | change, folder / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            load_on_cpu(folder)
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=own):
        load_on_cpu(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_need_no_files(family: MediaFamily, tmp_path: Path) -> None:
    folder = make_tiny_media_model(tmp_path, family)
    (folder / "model.safetensors").unlink()
    media = media_of(folder)
    first, again, other = (logits_of(load_on_cpu(folder, load_format="dummy", seed=seed), media) for seed in (3, 3, 4))
    assert torch.isfinite(first).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_that_nobody_wants_is_not_loaded(family: MediaFamily, spelling: Spelling, tmp_path: Path) -> None:
    """Nor need it be there. The decoder's answers are the same."""
    folder = make_tiny_media_model(tmp_path, family, spelling=spelling)
    tokens = prompt(media_of(folder), [20]).tokens
    whole, bare = load_on_cpu(folder), load_on_cpu(folder, media=None)
    assert isinstance(bare, MediaDecoder)
    assert bare.encoder is None
    expected, logits = (PagedForward(model).step([("a", tokens)])["a"] for model in (whole, bare))
    assert torch.equal(expected, logits)
    weights = load_file(folder / "model.safetensors")
    decoder = {name: values for name, values in weights.items() if decoder_name(name) is not None}
    assert len(decoder) < len(weights)
    save_file(decoder, folder / "model.safetensors")
    load_on_cpu(folder, media=None)
