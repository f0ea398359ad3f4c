"""The parts of a `config.json` that describes a decoder and a vision encoder: LLaVA, LLaVA-OneVision,
Qwen2-VL, Qwen2.5-VL, Qwen3-VL.

Knows the spellings of old checkpoints (Qwen's decoder beside the encoder, LLaVA's decoder by what differs from its
family's defaults) and of new ones (`text_config`, `rope_parameters`). Torch-free.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

from tokenmill_engine.config.hf_views import parse_views
from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_engine.errors import ConfigError

Json = dict[str, Any]

LLAVA = "LlavaForConditionalGeneration"
QWEN2_VL = "Qwen2VLForConditionalGeneration"
QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL = "Qwen3VLForConditionalGeneration"
LLAVA_ONEVISION = "LlavaOnevisionForConditionalGeneration"
MEDIA_ARCHITECTURES = (LLAVA, LLAVA_ONEVISION, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)

_DECODERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DECODER_DEFAULTS: dict[str, Json] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008},
    "mistral": {"vocab_size": 32000, "intermediate_size": 14336},
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016},
}
_SIZE_DEFAULTS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_QWEN_DECODERS: dict[str, Json] = {
    QWEN2_VL: {"architectures": [_DECODERS["qwen2"]], "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    QWEN2_5_VL: {"architectures": [_DECODERS["qwen2"]], "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    QWEN3_VL: {"architectures": [_DECODERS["qwen3"]], "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "head_dim": 128},
}
"""What they do not state."""

_LLAVA_VISION: Json = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""Of a LLaVA that states no vision encoder."""
_ONEVISION_VISION: Json = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
}
_LLAVA_DEFAULTS: dict[str, Json] = {
    LLAVA: {
        "vision_config": _LLAVA_VISION,
        "vision_feature_select_strategy": "default",
        "vision_feature_layer": -2,
    },
    LLAVA_ONEVISION: {
        "vision_config": _ONEVISION_VISION,
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
}
_QWEN3_VISION: Json = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_TOWER_DEFAULTS: dict[str, Json] = {
    "clip": {"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip": {"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
}
_TOWER_SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
_ACTIVATIONS = ("gelu", "quick_gelu", "gelu_pytorch_tanh", "silu")


def media_architecture(config: Mapping[str, Any]) -> str | None:
    """The class name of a supported model that looks at images; None for any other."""
    names = config.get("architectures") or []
    return next((str(name) for name in names if name in MEDIA_ARCHITECTURES), None)


def decoder_json(config: Mapping[str, Any], source: str) -> Json:
    """What the `config.json` of the decoder alone would say.

    Raises ConfigError for a decoder that is not supported.
    """
    name = media_architecture(config)
    is_qwen = name in _QWEN_DECODERS
    decoder = _qwen_decoder(config, _QWEN_DECODERS[str(name)]) if is_qwen else _llava_decoder(config, source)
    for key in ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id"):
        if decoder.get(key) is None and config.get(key) is not None:
            decoder[key] = config[key]
    decoder["tie_word_embeddings"] = bool(decoder.get("tie_word_embeddings")) or bool(config.get("tie_word_embeddings"))
    return decoder


def parse_media(config: Mapping[str, Any], source: str) -> MediaConfig | None:
    """How prompts carry images, by a `config.json`; None for models of text alone.

    Raises ConfigError for an encoder that is not supported, missing or malformed numbers.
    """
    name = media_architecture(config)
    if name is None:
        return None
    try:
        decoder = decoder_json(config, source)
        if name in _LLAVA_DEFAULTS:
            media = _llava(config, decoder, source)
        else:
            read = _qwen3_vision if name == QWEN3_VL else _qwen2_vision
            media = _qwen(config, decoder, read(config, decoder, source), source)
        vocab_size = decoder["vocab_size"]
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} is malformed: {error!r}") from error
    if not 0 <= media.image_token_id < vocab_size:
        raise ConfigError(f"{source}: image token {media.image_token_id} is not in the vocabulary of {vocab_size}")
    if media.tokens_per_second is not None and not media.tokens_per_second > 0:
        raise ConfigError(f"{source}: tokens_per_second must be above 0, not {media.tokens_per_second}")
    return media


# --- decoders -----------------------------------------------------------------------------------------------------


def _llava_decoder(config: Mapping[str, Any], source: str) -> Json:
    stated = dict(config.get("text_config") or {})
    family = stated.get("model_type", "llama" if media_architecture(config) == LLAVA else "qwen2")
    if family not in _DECODERS:
        raise ConfigError(f"{source}: text_config has model_type {family!r}; supported: {', '.join(_DECODERS)}")
    return _SIZE_DEFAULTS | _DECODER_DEFAULTS[family] | stated | {"architectures": [_DECODERS[family]]}


def _qwen_decoder(config: Mapping[str, Any], defaults: Json) -> Json:
    decoder = dict(config.get("text_config") or config) | {"architectures": defaults["architectures"]}
    for key in defaults.keys() - {"rope_theta"}:
        decoder.setdefault(key, defaults[key])
    for key in ("rope_scaling", "rope_parameters"):
        rope = dict(decoder.get(key) or {})
        for key_of_mrope in ("mrope_section", "mrope_interleaved"):
            rope.pop(key_of_mrope, None)
        for kind in ("rope_type", "type"):
            if rope.get(kind) == "mrope":
                rope[kind] = "default"
        decoder[key] = rope
    stated = [decoder, decoder["rope_scaling"], decoder["rope_parameters"]]
    if not any(place.get("rope_theta") for place in stated):
        decoder["rope_theta"] = defaults["rope_theta"]
    return decoder


# --- encoders -----------------------------------------------------------------------------------------------------


def _llava(config: Mapping[str, Any], decoder: Json, source: str) -> MediaConfig:
    name = str(media_architecture(config))
    config = _LLAVA_DEFAULTS[name] | {key: value for key, value in config.items() if value is not None}
    stated = dict(config["vision_config"])
    kind = str(stated.get("model_type", "clip_vision_model")).removesuffix("_vision_model")
    if kind not in _TOWER_DEFAULTS:
        raise ConfigError(f"{source}: vision_config has model_type {stated['model_type']!r}; supported: clip, siglip")
    stated = _TOWER_SIZES | _TOWER_DEFAULTS[kind] | stated
    num_layers = _number(stated, "num_hidden_layers", source)
    strategy = config["vision_feature_select_strategy"]
    if strategy not in ("default", "full"):
        raise ConfigError(f"{source}: vision_feature_select_strategy {strategy!r} is not supported (default, full)")
    token_id = config.get("image_token_index", config.get("image_token_id"))
    vision = VisionConfig(
        kind=cast(Any, kind),
        hidden_size=_number(stated, "hidden_size", source),
        intermediate_size=_number(stated, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=_number(stated, "num_attention_heads", source),
        patch_size=_number(stated, "patch_size", source),
        output_size=_number(decoder, "hidden_size", source),
        activation=_activation(stated["hidden_act"], source),
        norm_eps=float(stated["layer_norm_eps"]),
        num_channels=_number(stated | {"num_channels": stated.get("num_channels", 3)}, "num_channels", source),
        image_size=_number(stated, "image_size", source),
        feature_layers=_feature_layers(config["vision_feature_layer"], num_layers, source),
        drops_first=strategy == "default",
        projector_activation=_activation(config.get("projector_hidden_act", "gelu"), source),
        projector_bias=bool(config.get("multimodal_projector_bias", True)),
    )
    if name == LLAVA:
        return MediaConfig("llava", 32000 if token_id is None else int(token_id), vision)
    token_id = 151646 if token_id is None else int(token_id)
    video_token_id = int(config.get("video_token_index") or config.get("video_token_id") or 151647)
    views = parse_views(config, vision, source)
    return MediaConfig(
        "llava_onevision", token_id, vision, video_token_id=video_token_id, takes_video=True, views=views
    )


def _qwen(config: Mapping[str, Any], decoder: Json, vision: VisionConfig, source: str) -> MediaConfig:
    section = _mrope_section(config, decoder, source)
    is_third = vision.kind == "qwen3_vl"
    has_time = vision.kind == "qwen2_5_vl"
    return MediaConfig(
        "qwen2_vl",
        int(config.get("image_token_id", 151655)),
        vision,
        video_token_id=int(config.get("video_token_id", 151656)),
        vision_start_token_id=int(config.get("vision_start_token_id", 151652)),
        vision_end_token_id=int(config.get("vision_end_token_id", 151653)),
        takes_video=True,
        tokens_per_second=float((config.get("vision_config") or {}).get("tokens_per_second", 4)) if has_time else None,
        mrope_section=section,
        mrope_interleaved=is_third,
        frames_apart=is_third,
    )


def _qwen2_vision(config: Mapping[str, Any], decoder: Json, source: str) -> VisionConfig:
    """Of Qwen2-VL and Qwen2.5-VL."""
    stated = dict(config.get("vision_config") or {})
    has_windows = media_architecture(config) == QWEN2_5_VL
    width_key, output_key = ("hidden_size", "out_hidden_size") if has_windows else ("embed_dim", "hidden_size")
    defaults: Json
    if has_windows:
        defaults = {"hidden_size": 3584, "out_hidden_size": 3584, "intermediate_size": 3420, "window_size": 112}
        defaults |= {"hidden_act": "silu", "fullatt_block_indexes": [7, 15, 23, 31]}
    else:
        defaults = {"embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "hidden_act": "quick_gelu"}
    general = {
        "num_heads": stated.get("num_attention_heads", 16),
        "depth": stated.get("num_hidden_layers", 32),
        "in_channels": stated.get("in_chans", 3),
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    stated = general | defaults | stated
    hidden_size, output_size = _number(stated, width_key, source), _number(stated, output_key, source)
    if output_size != decoder["hidden_size"]:
        raise ConfigError(f"{source}: {output_key} {output_size} is not the decoder's {decoder['hidden_size']}")
    inner = stated["intermediate_size"] if has_windows else int(hidden_size * stated["mlp_ratio"])
    activation = _activation(stated["hidden_act"], source)
    if has_windows and activation != "silu":
        raise ConfigError(f"{source}: hidden_act {activation!r} of the vision encoder is not supported, only 'silu'")
    return VisionConfig(
        kind="qwen2_5_vl" if has_windows else "qwen2_vl",
        hidden_size=hidden_size,
        intermediate_size=int(inner),
        num_layers=_number(stated, "depth", source),
        num_heads=_number(stated, "num_heads", source),
        patch_size=_number(stated, "patch_size", source),
        output_size=output_size,
        activation=activation,
        num_channels=_number(stated, "in_channels", source),
        temporal_patch_size=_number(stated, "temporal_patch_size", source),
        spatial_merge_size=_number(stated, "spatial_merge_size", source),
        window_size=_number(stated, "window_size", source) if has_windows else None,
        full_attention_layers=tuple(map(int, stated["fullatt_block_indexes"])) if has_windows else (),
    )


def _qwen3_vision(config: Mapping[str, Any], decoder: Json, source: str) -> VisionConfig:
    stated = _QWEN3_VISION | dict(config.get("vision_config") or {})
    num_layers, output_size = _number(stated, "depth", source), _number(stated, "out_hidden_size", source)
    if output_size != decoder["hidden_size"]:
        raise ConfigError(f"{source}: out_hidden_size {output_size} is not the decoder's {decoder['hidden_size']}")
    num_positions = _number(stated, "num_position_embeddings", source)
    side = math.isqrt(num_positions)
    if side**2 != num_positions:
        raise ConfigError(f"{source}: num_position_embeddings {num_positions} is no square of a number")
    layers = tuple(map(int, stated["deepstack_visual_indexes"]))
    if any(not 0 <= layer < num_layers for layer in layers) or list(layers) != sorted(set(layers)):
        raise ConfigError(f"{source}: deepstack_visual_indexes {list(layers)} are not some of {num_layers} layers")
    if len(layers) >= decoder["num_hidden_layers"]:
        raise ConfigError(f"{source}: {len(layers)} deepstack_visual_indexes are too many for the decoder's layers")
    return VisionConfig(
        kind="qwen3_vl",
        hidden_size=_number(stated, "hidden_size", source),
        intermediate_size=_number(stated, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=_number(stated, "num_heads", source),
        patch_size=_number(stated, "patch_size", source),
        output_size=output_size,
        activation=_activation(stated["hidden_act"], source),
        num_channels=_number(stated, "in_channels", source),
        temporal_patch_size=_number(stated, "temporal_patch_size", source),
        spatial_merge_size=_number(stated, "spatial_merge_size", source),
        positions_side=side,
        deepstack_layers=layers,
    )


def _mrope_section(config: Mapping[str, Any], decoder: Json, source: str) -> tuple[int, int, int]:
    text = config.get("text_config") or config
    rope = [text.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    default = [24, 20, 20] if media_architecture(config) == QWEN3_VL else [16, 24, 24]
    section = next((place["mrope_section"] for place in rope if "mrope_section" in place), default)
    half = (decoder.get("head_dim") or decoder["hidden_size"] // decoder["num_attention_heads"]) // 2
    if len(section) != 3 or sum(section) != half:
        raise ConfigError(f"{source}: mrope_section {section} does not share out the {half} rotary frequencies")
    time, height, width = map(int, section)
    return time, height, width


def _feature_layers(stated: int | list[int], num_layers: int, source: str) -> tuple[int, ...]:
    layers = [stated] if isinstance(stated, int) else list(stated)
    if not layers or any(not -num_layers - 1 <= layer <= num_layers for layer in layers):
        raise ConfigError(f"{source}: vision_feature_layer {stated} is not among {num_layers} layers")
    return tuple(layer % (num_layers + 1) for layer in layers)


def _activation(name: Any, source: str) -> str:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{source}: activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return str(name)


def _number(config: Mapping[str, Any], key: str, source: str) -> int:
    """A positive number; a list counts if all in it are equal."""
    value = config[key]
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{source}: {key} must be a positive integer, not {config[key]!r}")
    return value
