"""Configurations of models that look at images, in every spelling."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_media_models import (
    ADDED_TOKENS,
    IMAGE_PAD,
    MROPE_SECTION,
    MediaFamily,
    Spelling,
    make_tiny_media_model,
    tiny_media_config,
)
from tests.support.tiny_models import EOS_TOKEN_ID, tiny_config
from tokenmill_engine.config.hf_folder import parse_architecture
from tokenmill_engine.config.hf_media import parse_media
from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.errors import ConfigError

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def media_of(config: dict[str, Any]) -> MediaConfig:
    media = parse_media(config, "config.json")
    assert media is not None
    return media


def test_models_of_text_have_no_media() -> None:
    assert parse_media(tiny_config("qwen2"), "config.json") is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_both_spellings_of_qwen_say_the_same(family: MediaFamily) -> None:
    old, new = (tiny_media_config(family, spelling) for spelling in ("old", "new"))
    assert "text_config" in new
    assert "text_config" not in old
    assert parse_media(old, "config.json") == parse_media(new, "config.json")
    assert parse_architecture(old, "config.json") == parse_architecture(new, "config.json")


def test_the_decoder_has_the_name_of_the_whole_and_the_shape_of_its_family() -> None:
    architecture = parse_architecture(tiny_media_config("qwen2_vl", "old"), "config.json")
    assert architecture.name == "Qwen2VLForConditionalGeneration"
    assert (architecture.qkv_bias, architecture.output_bias) == (True, False)
    assert architecture.rope.kind == "default"
    assert (architecture.head_dim, architecture.rope.theta, architecture.checkpoint_dtype) == (16, 10000.0, "float32")


def test_qwen2_vl_is_read() -> None:
    assert media_of(tiny_media_config("qwen2_vl")) == MediaConfig(
        kind="qwen2_vl",
        image_token_id=ADDED_TOKENS[IMAGE_PAD],
        vision=VisionConfig(
            kind="qwen2_vl",
            hidden_size=32,
            intermediate_size=64,
            num_layers=3,
            num_heads=2,
            patch_size=4,
            output_size=64,
            activation="quick_gelu",
            temporal_patch_size=2,
            spatial_merge_size=2,
        ),
        video_token_id=ADDED_TOKENS["<|video_pad|>"],
        vision_start_token_id=ADDED_TOKENS["<|vision_start|>"],
        vision_end_token_id=ADDED_TOKENS["<|vision_end|>"],
        takes_video=True,
        mrope_section=(2, 3, 3),
    )


def test_windows_of_qwen2_5_vl_are_read() -> None:
    vision = media_of(tiny_media_config("qwen2_5_vl", "old")).vision
    assert (vision.window_size, vision.full_attention_layers, vision.intermediate_size) == (16, (1,), 48)
    assert vision.patch_dim == 3 * 2 * 4 * 4
    assert vision.tokens_per_image is None


def test_qwen2_5_vl_is_told_how_long_a_second_is() -> None:
    config = tiny_media_config("qwen2_5_vl", vision_config={"tokens_per_second": 2})
    assert media_of(config).tokens_per_second == 2.0
    assert media_of(tiny_media_config("qwen2_5_vl")).tokens_per_second == 4.0
    config["vision_config"]["tokens_per_second"] = 0
    with pytest.raises(ConfigError, match="tokens_per_second must be above 0"):
        media_of(config)


def test_qwen3_vl_is_read_as_hubs_have_it() -> None:
    """The numbers of Qwen3-VL-4B-Instruct."""
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 151655,
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": True,
        "video_token_id": 151656,
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17],
            "depth": 24,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024,
            "in_channels": 3,
            "intermediate_size": 4096,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 2560,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 151653,
        "vision_start_token_id": 151652,
    }
    architecture = parse_architecture(config, "config.json")
    assert (architecture.head_dim, architecture.rope.theta, architecture.tie_word_embeddings) == (128, 5000000.0, True)
    assert (architecture.qk_norm, architecture.checkpoint_dtype) == (True, "bfloat16")
    media = media_of(config)
    assert (media.mrope_section, media.mrope_interleaved, media.frames_apart) == ((24, 20, 20), True, True)
    vision = media.vision
    assert (vision.positions_side, vision.deepstack_layers, vision.row_size) == (48, (5, 11, 17), 4 * 2560)
    assert 410e6 < vision.num_parameters < 420e6


def test_llava_as_old_hubs_have_it_takes_the_rest_from_its_families(tmp_path: Path) -> None:
    """As llava-1.5-7b states it: what differs from the defaults of the decoder's and the encoder's family."""
    import transformers

    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "text_config": {
            "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 4096,
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        "torch_dtype": "float16",
        "vision_config": {
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "model_type": "clip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 32064,
    }
    architecture = parse_architecture(config, "config.json")
    assert (architecture.hidden_size, architecture.intermediate_size, architecture.num_layers) == (4096, 11008, 32)
    assert (architecture.vocab_size, architecture.checkpoint_dtype) == (32064, "float16")
    media = media_of(config)
    assert media.vision.tokens_per_image == 576
    assert media.vision.feature_layers == (23,)
    assert (media.vision.activation, media.vision.norm_eps) == ("quick_gelu", 1e-5)
    assert media_of({key: value for key, value in config.items() if key != "vision_config"}) == media
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "llava"}))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text()) | {"architectures": config["architectures"]}
    assert media_of(written) == media
    assert parse_architecture(written, "config.json") == architecture


QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
"""As the hub has it."""


def test_qwen2_5_vl_as_the_hub_has_it_reads_as_what_transformers_makes_of_it(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(QWEN2_5_VL_7B))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "text_config" in written
    assert media_of(written) == media_of(QWEN2_5_VL_7B)
    ours, theirs = parse_architecture(QWEN2_5_VL_7B, "config.json"), parse_architecture(written, "config.json")
    assert ours == theirs
    assert (ours.head_dim, ours.rope.theta, ours.max_position_embeddings) == (128, 1000000.0, 128000)
    assert set(ours.layer_windows) == {None}
    assert media_of(written).mrope_section == (16, 24, 24)


@pytest.mark.parametrize(
    ("family", "strategy", "tokens"),
    [("llava", "default", 9), ("llava", "full", 10), ("llava_siglip", "default", 8), ("llava_siglip", "full", 9)],
)
def test_rows_of_an_image_follow_from_the_tower_and_the_strategy(
    family: MediaFamily, strategy: str, tokens: int
) -> None:
    config = tiny_media_config(family, vision_feature_select_strategy=strategy)
    assert media_of(config).vision.tokens_per_image == tokens


def test_feature_layers_are_counted_from_the_front() -> None:
    assert media_of(tiny_media_config("llava", vision_feature_layer=[-1, 0, -4])).vision.feature_layers == (3, 0, 0)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("llava", {"vision_feature_layer": 4}, "vision_feature_layer 4"),
        ("llava", {"vision_feature_layer": []}, "vision_feature_layer"),
        ("llava", {"vision_feature_select_strategy": "cls_patch"}, "cls_patch"),
        ("llava", {"projector_hidden_act": "relu"}, "'relu'"),
        ("llava", {"image_token_index": 512}, "image token 512"),
        ("llava", {"vision_config": {"model_type": "pixtral"}}, "pixtral"),
        ("llava", {"vision_config": {"hidden_size": 0}}, "hidden_size"),
        ("llava", {"text_config": {"model_type": "gemma"}}, "gemma"),
        ("qwen2_vl", {"vision_config": {"hidden_size": 128}}, "hidden_size 128"),
        ("qwen2_vl", {"vision_config": {"patch_size": [4, 5]}}, "patch_size"),
        ("qwen2_vl", {"vision_config": {"hidden_act": "mish"}}, "mish"),
        ("qwen3_vl", {"vision_config": {"out_hidden_size": 128}}, "out_hidden_size 128"),
        ("qwen3_vl", {"vision_config": {"num_position_embeddings": 26}}, "26 is no square"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [3]}}, "not some of 3 layers"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [1, 0]}}, "not some of 3 layers"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [0, 1, 2]}}, "too many for the decoder"),
        ("qwen3_vl", {"text_config": {"head_dim": 32}}, "mrope_section"),
        ("qwen2_vl", {"text_config": {"num_attention_heads": 2}}, "mrope_section"),
        ("qwen2_5_vl", {"vision_config": {"hidden_act": "gelu"}}, "silu"),
        ("qwen2_5_vl", {"vision_config": {"fullatt_block_indexes": None}}, "malformed"),
    ],
)
def test_what_is_not_supported_is_refused(family: MediaFamily, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_media(tiny_media_config(family, **overrides), "config.json")


@pytest.mark.parametrize("spelling", ["old", "new"])
@pytest.mark.parametrize("family", FAMILIES)
def test_folders_carry_the_media(tmp_path: Path, family: MediaFamily, spelling: Spelling) -> None:
    files = resolve_model(str(make_tiny_media_model(tmp_path, family, spelling=spelling)))
    config = json.loads((tmp_path / "config.json").read_text())
    assert files.media == media_of(config)
    assert files.eos_token_ids == (EOS_TOKEN_ID,)
    assert files.max_position == 1024


def test_the_end_token_of_a_nested_decoder_counts(tmp_path: Path) -> None:
    make_tiny_media_model(tmp_path, "qwen2_vl", text_config={"eos_token_id": 77})
    (tmp_path / "generation_config.json").unlink()
    assert 77 in resolve_model(str(tmp_path)).eos_token_ids


def test_sections_stated_in_rope_parameters_or_scaling_count() -> None:
    assert tuple(MROPE_SECTION) == media_of(tiny_media_config("qwen2_vl", "old")).mrope_section
    config = tiny_media_config("qwen2_vl", "new")
    config["text_config"]["rope_scaling"] = {"rope_type": "default", "type": "mrope", "mrope_section": [4, 2, 2]}
    assert media_of(config).mrope_section == (4, 2, 2)


@pytest.mark.parametrize(
    ("name", "changes", "millions"),
    [
        # By the model cards: CLIP ViT-L/14 at 336 pixels has 304 M (without its last layer 291 M), the projector 21 M.
        ("llava", {}, 312),
        ("qwen2_vl", {"embed_dim": 1280, "hidden_size": 1536, "depth": 32, "mlp_ratio": 4}, 665),
    ],
)
def test_parameters_of_real_encoders_are_counted(name: MediaFamily, changes: dict[str, Any], millions: int) -> None:
    if name == "llava":
        config: dict[str, Any] = {
            "architectures": ["LlavaForConditionalGeneration"],
            "text_config": {"vocab_size": 32064},
        }
    else:
        real = {"patch_size": 14, "num_heads": 16} | changes
        config = tiny_media_config(
            name, text_config={"hidden_size": 1536, "num_attention_heads": 96}, vision_config=real
        )
    assert media_of(config).vision.num_parameters == pytest.approx(millions * 1e6, rel=0.01)
