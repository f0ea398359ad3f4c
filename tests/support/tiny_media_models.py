"""Tiny random models that look at images, as folders. As `tiny_models`, with a vision encoder of three layers of
width 32, in either spelling of checkpoints."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from tests.support.tiny_models import (
    VOCAB_SIZE,
    Family,
    Weights,
    _cache_folder,
    _write_json,
    tiny_config,
    tiny_weights,
    tokenizer_json,
    write_tokenizer,
)

MediaFamily = Literal["llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
Spelling = Literal["old", "new"]

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
LLAVA_IMAGE = "<image>"
_FIRST_ADDED = VOCAB_SIZE - 12
ADDED_TOKENS = {
    text: _FIRST_ADDED + index
    for index, text in enumerate((VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, LLAVA_IMAGE))
}
PATCH_SIZE, MERGE_SIZE, TEMPORAL_PATCH_SIZE = 4, 2, 2
LLAVA_IMAGE_SIZE, LLAVA_PATCH_SIZE = 24, 8
ONEVISION_SIZES = [[24 * rows, 24 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
MROPE_SECTION = [2, 3, 3]

_DECODERS: dict[MediaFamily, Family] = {
    "llava": "llama",
    "llava_siglip": "llama",
    "llava_onevision": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
}
_PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
}

_LIST_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' or 'image_url' in part %}"
    "{{ IMAGE }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def is_qwen(family: MediaFamily) -> bool:
    return family.startswith("qwen")


def image_token_id(family: MediaFamily) -> int:
    return ADDED_TOKENS[IMAGE_PAD if is_qwen(family) else LLAVA_IMAGE]


def make_tiny_media_model(
    directory: str | Path, family: MediaFamily, seed: int = 0, spelling: Spelling = "new", **overrides: Any
) -> Path:
    """Writes config, weights, tokenizer, chat template and the processor's settings; returns the folder.

    `overrides` replace keys of `config.json`; those called `text_*` and `vision_*` with a dict add to the part's.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_media_config(family, spelling, **overrides)
    _write_json(folder / "config.json", config)
    weights = tiny_media_weights(config, family, seed)
    save_file(
        {_spelled(name, family, spelling): value for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(folder)
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    image = f"{VISION_START}{IMAGE_PAD}{VISION_END}" if is_qwen(family) else LLAVA_IMAGE
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer_config["chat_template"] = _LIST_TEMPLATE.replace("IMAGE", repr(image))
    tokenizer_config["added_tokens_decoder"] = {
        str(token_id): {"content": text, "special": True} for text, token_id in ADDED_TOKENS.items()
    }
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "preprocessor_config.json", _processor_config(family))
    if family == "qwen3_vl":
        _write_json(folder / "video_preprocessor_config.json", _VIDEO_PROCESSOR)
    return folder


def cached_tiny_media_model(family: MediaFamily, seed: int = 0, spelling: Spelling = "new", **overrides: Any) -> Path:
    """As `make_tiny_media_model`, in a folder shared by all callers of this process. Nobody may change it."""
    key = json.dumps([family, seed, spelling, overrides], sort_keys=True)
    folder = _cache_folder() / f"{family}-{hash(key) & 0xFFFFFFFF:08x}"
    return folder if folder.is_dir() else make_tiny_media_model(folder, family, seed, spelling, **overrides)


def tiny_media_config(family: MediaFamily, spelling: Spelling = "new", **overrides: Any) -> dict[str, Any]:
    """The model's `config.json`."""
    text: dict[str, Any] = tiny_config(_DECODERS[family]) | overrides.pop("text_config", {})
    vision = _vision_config(family) | overrides.pop("vision_config", {})
    if not is_qwen(family):
        llava: dict[str, Any] = {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": text,
            "vision_config": vision,
            "image_token_index": image_token_id(family),
            "torch_dtype": "float32",
            "tie_word_embeddings": text["tie_word_embeddings"],
        }
        if family == "llava_onevision":
            llava["architectures"], llava["model_type"] = ["LlavaOnevisionForConditionalGeneration"], family
            llava |= {"video_token_index": ADDED_TOKENS[VIDEO_PAD], "vision_aspect_ratio": "anyres_max_2"}
            llava["image_grid_pinpoints"] = ONEVISION_SIZES
        llava.update(overrides)
        return llava
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
    general: dict[str, Any] = {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": family,
        "image_token_id": ADDED_TOKENS[IMAGE_PAD],
        "video_token_id": ADDED_TOKENS[VIDEO_PAD],
        "vision_start_token_id": ADDED_TOKENS[VISION_START],
        "vision_end_token_id": ADDED_TOKENS[VISION_END],
        "vision_config": vision,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    if family != "qwen3_vl":
        del text["head_dim"]
    theta = text.pop("rope_theta")
    if spelling == "old":
        text |= {"rope_theta": theta, "rope_scaling": {"type": "mrope", "mrope_section": MROPE_SECTION}}
        return text | general | overrides
    text |= {"model_type": f"{family}_text", "dtype": text.pop("torch_dtype")}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": MROPE_SECTION, "rope_theta": theta}
    return general | {"text_config": text, "dtype": "float32"} | overrides


def _vision_config(family: MediaFamily) -> dict[str, Any]:
    if not is_qwen(family):
        return {
            "model_type": "clip_vision_model" if family == "llava" else "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": LLAVA_IMAGE_SIZE,
            "patch_size": LLAVA_PATCH_SIZE,
            "projection_dim": 16,
        }
    general = {
        "model_type": f"{family}_vision",
        "depth": 3,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": PATCH_SIZE,
        "spatial_merge_size": MERGE_SIZE,
        "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    }
    if family == "qwen2_vl":
        return general | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "hidden_act": "quick_gelu"}
    if family == "qwen3_vl":
        return general | {
            "model_type": "qwen3_vl",
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 48,
            "hidden_act": "gelu_pytorch_tanh",
            "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        }
    return general | {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "hidden_act": "silu",
        "window_size": 2 * MERGE_SIZE * PATCH_SIZE,
        "fullatt_block_indexes": [1],
    }


def tiny_media_weights(config: dict[str, Any], family: MediaFamily, seed: int = 0) -> Weights:
    """Random weights: the decoder's as `tiny_weights` names them, the encoder's under `visual.`."""
    text = dict(config.get("text_config") or config)
    text["head_dim"] = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    text |= {"model_type": _DECODERS[family] if is_qwen(family) else text["model_type"]}
    text["tie_word_embeddings"] = config["tie_word_embeddings"]
    return tiny_weights(text, seed) | _Vision(config["vision_config"], seed + 1).weights(config, text, family)


class _Vision:
    def __init__(self, vision: dict[str, Any], seed: int) -> None:
        self._vision, self._rng, self._weights = vision, np.random.default_rng(seed), Weights()

    def weights(self, config: dict[str, Any], text: dict[str, Any], family: MediaFamily) -> Weights:
        if family == "qwen3_vl":
            self._qwen3()
        elif is_qwen(family):
            self._qwen(has_windows=family == "qwen2_5_vl")
        else:
            self._tower(config, text, is_clip=family == "llava")
        return self._weights

    def _values(self, name: str, *shape: int, scale: float = 1.0) -> None:
        self._weights[name] = np.float32(scale) * self._rng.standard_normal(shape, np.float32)

    def _linear(self, name: str, rows: int, columns: int) -> None:
        self._values(f"{name}.weight", rows, columns, scale=columns**-0.5)
        self._values(f"{name}.bias", rows, scale=0.3)

    def _norm(self, name: str, size: int, has_bias: bool = True) -> None:
        self._weights[f"{name}.weight"] = 1 + 0.2 * self._rng.standard_normal(size, np.float32)
        if has_bias:
            self._values(f"{name}.bias", size, scale=0.2)

    def _qwen(self, has_windows: bool) -> None:
        vision = self._vision
        width = vision["hidden_size" if has_windows else "embed_dim"]
        output = vision["out_hidden_size" if has_windows else "hidden_size"]
        kernel = (3, vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
        self._values("visual.patch_embed.proj.weight", width, *kernel, scale=float(np.prod(kernel)) ** -0.5)
        inner = vision["intermediate_size"] if has_windows else width * vision["mlp_ratio"]
        for index in range(vision["depth"]):
            layer = f"visual.blocks.{index}"
            self._norm(f"{layer}.norm1", width, not has_windows)
            self._linear(f"{layer}.attn.qkv", 3 * width, width)
            self._linear(f"{layer}.attn.proj", width, width)
            self._norm(f"{layer}.norm2", width, not has_windows)
            shapes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
            for name, shape in (shapes if has_windows else {"fc1": (inner, width), "fc2": (width, inner)}).items():
                self._linear(f"{layer}.mlp.{name}", *shape)
        merged = width * vision["spatial_merge_size"] ** 2
        self._norm("visual.merger.ln_q", width, not has_windows)
        self._linear("visual.merger.mlp.0", merged, merged)
        self._linear("visual.merger.mlp.2", output, merged)

    def _qwen3(self) -> None:
        vision = self._vision
        width, inner, output = (vision[key] for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
        kernel = (3, vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
        self._values("visual.patch_embed.proj.weight", width, *kernel, scale=float(np.prod(kernel)) ** -0.5)
        self._values("visual.patch_embed.proj.bias", width, scale=0.3)
        self._values("visual.pos_embed.weight", vision["num_position_embeddings"], width)
        for index in range(vision["depth"]):
            layer = f"visual.blocks.{index}"
            for name in ("norm1", "norm2"):
                self._norm(f"{layer}.{name}", width)
            for name, rows, columns in (
                ("attn.qkv", 3 * width, width),
                ("attn.proj", width, width),
                ("mlp.linear_fc1", inner, width),
                ("mlp.linear_fc2", width, inner),
            ):
                self._linear(f"{layer}.{name}", rows, columns)
        merged = width * vision["spatial_merge_size"] ** 2
        deep = [f"deepstack_merger_list.{index}" for index in range(len(vision["deepstack_visual_indexes"]))]
        for merger in ("merger", *deep):
            self._norm(f"visual.{merger}.norm", width if merger == "merger" else merged)
            self._linear(f"visual.{merger}.linear_fc1", merged, merged)
            self._linear(f"visual.{merger}.linear_fc2", output, merged)

    def _tower(self, config: dict[str, Any], text: dict[str, Any], is_clip: bool) -> None:
        vision = self._vision
        width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
        self._values("visual.embeddings.patch_embedding.weight", width, 3, patch, patch, scale=(3 * patch**2) ** -0.5)
        num_patches = (vision["image_size"] // patch) ** 2
        self._values("visual.embeddings.position_embedding.weight", num_patches + is_clip, width)
        if is_clip:
            self._values("visual.embeddings.class_embedding", width)
            self._norm("visual.pre_layrnorm", width)
        else:
            self._values("visual.embeddings.patch_embedding.bias", width, scale=0.3)
            self._pooling_head(width, inner)
        for index in range(vision["num_hidden_layers"]):
            layer = f"visual.encoder.layers.{index}"
            for name in ("layer_norm1", "layer_norm2"):
                self._norm(f"{layer}.{name}", width)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                self._linear(f"{layer}.self_attn.{name}", width, width)
            self._linear(f"{layer}.mlp.fc1", inner, width)
            self._linear(f"{layer}.mlp.fc2", width, inner)
        self._norm("visual.post_layernorm", width)
        is_onevision = config["model_type"] == "llava_onevision"
        if is_onevision:
            self._values("image_newline", text["hidden_size"])
        layers = config.get("vision_feature_layer", -1 if is_onevision else -2)
        features = width * (1 if isinstance(layers, int) else len(layers))
        self._linear("multi_modal_projector.linear_1", text["hidden_size"], features)
        self._linear("multi_modal_projector.linear_2", text["hidden_size"], text["hidden_size"])

    def _pooling_head(self, width: int, inner: int) -> None:
        """SigLIP's, which LLaVA has no use for."""
        self._values("visual.head.probe", 1, 1, width)
        self._values("visual.head.attention.in_proj_weight", 3 * width, width)
        self._values("visual.head.attention.in_proj_bias", 3 * width)
        self._linear("visual.head.attention.out_proj", width, width)
        self._norm("visual.head.layernorm", width)
        self._linear("visual.head.mlp.fc1", inner, width)
        self._linear("visual.head.mlp.fc2", width, inner)


def _spelled(name: str, family: MediaFamily, spelling: Spelling) -> str:
    """The name in a checkpoint."""
    if is_qwen(family):
        if spelling == "old":
            return name
        name = re.sub(r"^model\.", "model.language_model.", name)
        return re.sub(r"^visual\.", "model.visual.", name)
    if spelling == "old":
        name = re.sub(r"^(model|lm_head)\.", r"language_model.\1.", name)
        return re.sub(r"^visual\.", "vision_tower.vision_model.", name)
    name = re.sub(r"^model\.", "model.language_model.", name)
    name = re.sub(r"^visual\.", "model.vision_tower.vision_model.", name)
    return re.sub(r"^(multi_modal_projector\.|image_newline$)", r"model.\1", name)


def _processor_config(family: MediaFamily) -> dict[str, Any]:
    if is_qwen(family):
        return {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": _PROCESSORS[family],
            "patch_size": PATCH_SIZE,
            "merge_size": MERGE_SIZE,
            "temporal_patch_size": TEMPORAL_PATCH_SIZE,
            "min_pixels": 4 * (PATCH_SIZE * MERGE_SIZE) ** 2,
            "max_pixels": 64 * (PATCH_SIZE * MERGE_SIZE) ** 2,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
        }
    size = LLAVA_IMAGE_SIZE
    general = {
        "processor_class": "LlavaProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    if family == "llava_onevision":
        sizes = {"size": {"height": size, "width": size}, "image_grid_pinpoints": ONEVISION_SIZES}
        general |= sizes | {"processor_class": "LlavaOnevisionProcessor"}
        return general | {"image_processor_type": "LlavaOnevisionImageProcessor"}
    if family == "llava_siglip":
        return general | {"image_processor_type": "SiglipImageProcessor", "size": {"height": size, "width": size}}
    return general | {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": size},
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_convert_rgb": True,
    }


_VIDEO_PROCESSOR = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": PATCH_SIZE,
    "merge_size": MERGE_SIZE,
    "temporal_patch_size": TEMPORAL_PATCH_SIZE,
    "size": {"shortest_edge": 4 * (PATCH_SIZE * MERGE_SIZE) ** 2, "longest_edge": 512 * (PATCH_SIZE * MERGE_SIZE) ** 2},
}
"""Of Qwen3-VL, whose limits are of all frames together; the others have one file for images and videos."""


@cache
def _tokenizer_json() -> str:
    """The tiny tokenizer with the tokens that stand around and for images."""
    tokenizer = json.loads(tokenizer_json())
    assert len(tokenizer["model"]["vocab"]) <= _FIRST_ADDED
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{"id": token_id, "content": text} | plain for text, token_id in ADDED_TOKENS.items()]
    return json.dumps(tokenizer)
