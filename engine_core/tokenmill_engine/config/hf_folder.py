"""Reads a model folder in Hugging Face layout: configuration, generation defaults, special tokens, weight files.

Knows the JSON spellings of the supported families, old (`rope_theta`, `rope_scaling`, `torch_dtype`) and new
(`rope_parameters`, `dtype`, transformers 5). Reads headers of safetensors files, never their data. Torch-free.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from tokenmill_engine.config.architecture import ArchitectureConfig, RopeConfig
from tokenmill_engine.config.hf_bert import TEXT_ENCODERS, parse_text_encoder
from tokenmill_engine.config.hf_media import MEDIA_ARCHITECTURES, decoder_json, media_architecture
from tokenmill_engine.config.json_values import optional_positive, positive
from tokenmill_engine.errors import ConfigError

Json = dict[str, Any]

TEXT_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_HEADLESS = {name.replace("ForCausalLM", "Model"): name for name in TEXT_ARCHITECTURES}
"""Names of models that were saved without output embeddings."""
SUPPORTED_ARCHITECTURES = TEXT_ARCHITECTURES + MEDIA_ARCHITECTURES + tuple(_HEADLESS) + TEXT_ENCODERS

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_CHECKPOINT_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_SAFETENSORS_HEADER_BYTES = 100_000_000


def read_json(path: Path) -> Json:
    """The object in a JSON file. Raises ConfigError, naming the file, if it is unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> Json:
    """As `read_json`, but {} for a file that does not exist."""
    return read_json(path) if path.is_file() else {}


# --- config.json ------------------------------------------------------------------------------------------------


def parse_architecture(config: Mapping[str, Any], source: str) -> ArchitectureConfig:
    """The decoder or text encoder that a `config.json` describes, under the name of the whole model; `source` names it
    in errors.

    Raises ConfigError for another architecture, another activation, quantized weights, missing or malformed numbers.
    """
    try:
        whole = media_architecture(config)
        if whole is not None:
            return replace(_parse_architecture(decoder_json(config, source), source), name=whole)
        return parse_text_encoder(config, source) or _parse_architecture(config, source)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{source} is malformed: {error!r}") from error


def _parse_architecture(config: Mapping[str, Any], source: str) -> ArchitectureConfig:
    name = _architecture_name(config, source)
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ConfigError(f"{source}: quantized checkpoints ({method}) are not supported; use 16-bit weights or a GGUF")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"{source}: hidden_act {activation!r} is not supported, only 'silu'")
    hidden_size = positive(config, "hidden_size", source)
    num_heads = positive(config, "num_attention_heads", source)
    num_layers = positive(config, "num_hidden_layers", source)
    num_kv_heads = optional_positive(config, "num_key_value_heads", source) or (
        8 if name == "MistralForCausalLM" else num_heads
    )
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = optional_positive(config, "head_dim", source) or (
        128 if name == "Qwen3ForCausalLM" else hidden_size // num_heads
    )
    attention_bias = bool(config.get("attention_bias", False)) and name in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    rope, max_position = _rope(config, head_dim, _max_position(config, name, source), source)
    return ArchitectureConfig(
        name=name,
        vocab_size=positive(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max_position,
        rope=rope,
        layer_windows=_layer_windows(config, name, num_layers, source),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=name == "Qwen2ForCausalLM" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=name == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=name == "Qwen3ForCausalLM",
        checkpoint_dtype=_checkpoint_dtype(config),
        has_output_embeddings=not _HEADLESS.keys() & set(config.get("architectures") or ()),
    )


def _architecture_name(config: Mapping[str, Any], source: str) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in TEXT_ARCHITECTURES or name in _HEADLESS:
            return _HEADLESS.get(name, str(name))
    found = ", ".join(map(str, names)) or f"no architecture (model_type {config.get('model_type')!r})"
    raise ConfigError(f"{source} names {found}; supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)}")


def _max_position(config: Mapping[str, Any], name: str, source: str) -> int:
    family_default = {"LlamaForCausalLM": 2048, "MistralForCausalLM": 131072}.get(name, 32768)
    return optional_positive(config, "max_position_embeddings", source) or family_default


def _checkpoint_dtype(config: Mapping[str, Any]) -> Literal["float32", "bfloat16", "float16"]:
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in _CHECKPOINT_DTYPES:
        return "bfloat16"
    return cast(Literal["float32", "bfloat16", "float16"], name)


def _layer_windows(config: Mapping[str, Any], name: str, num_layers: int, source: str) -> tuple[int | None, ...]:
    """Mistral slides in every layer; the Qwens only if told, in the layers that `layer_types` or
    `max_window_layers` name; Llama never."""
    if name == "LlamaForCausalLM":
        return (None,) * num_layers
    window = optional_positive(config, "sliding_window", source) if "sliding_window" in config else 4096
    if name == "MistralForCausalLM":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = int(config.get("max_window_layers", 28))
        return tuple(window if index >= first else None for index in range(num_layers))
    if len(layer_types) != num_layers:
        raise ConfigError(f"{source}: layer_types has {len(layer_types)} entries for {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _rope(config: Mapping[str, Any], head_dim: int, max_position: int, source: str) -> tuple[RopeConfig, int]:
    """Rotary embedding, and how many positions it serves: linear and YaRN scaling extend the length that the
    checkpoint states, llama3 scaling is already counted in it."""
    scaling = dict(config.get("rope_scaling") or {}) or dict(config.get("rope_parameters") or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KINDS:
        raise ConfigError(f"{source}: rope scaling {kind!r} is not supported; supported: {', '.join(_ROPE_KINDS)}")
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * partial) if partial != 1.0 else None
    original = int(
        config.get("original_max_position_embeddings")
        or scaling.get("original_max_position_embeddings")
        or max_position
    )
    if kind == "default":
        return RopeConfig(theta=theta, rotary_dim=rotary_dim), max_position
    factor = scaling.get("factor")
    if factor is None and kind == "yarn":
        factor = max_position / original
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 0:
        raise ConfigError(f"{source}: rope scaling {kind!r} needs a positive factor, not {factor!r}")
    factor = float(factor)
    rope = RopeConfig(
        theta=theta,
        kind=cast(Literal["linear", "llama3", "yarn"], kind),
        factor=factor,
        original_max_position=original,
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else None,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=bool(scaling.get("truncate", True)),
        rotary_dim=rotary_dim,
    )
    if kind == "linear":
        return rope, int(max_position * factor)
    if kind == "yarn":
        return rope, max(max_position, int(original * factor))
    return rope, max_position


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float | None:
    """The stated factor on cos and sin, or the ratio that `mscale` and `mscale_all_dim` give, else None (paper's)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not numerator or not denominator or factor <= 1:
        return None
    return float((0.1 * numerator * math.log(factor) + 1.0) / (0.1 * denominator * math.log(factor) + 1.0))


# --- generation defaults, tokens, templates -----------------------------------------------------------------------


def read_generation_defaults(folder: Path) -> dict[str, float | int]:
    """Sampling defaults in `generation_config.json` under our names (`max_tokens` for `max_new_tokens`)."""
    config = read_optional_json(folder / "generation_config.json")
    defaults = {key: config[key] for key in _SAMPLING_DEFAULTS if config.get(key) is not None}
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    return defaults


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What chat templates and the end of generation need to know of a tokenizer."""

    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Begin and end tokens that `tokenizer_config.json` (or `special_tokens_map.json`) names."""
    config = read_optional_json(folder / "special_tokens_map.json") | read_optional_json(
        folder / "tokenizer_config.json"
    )
    eos_token = _token_text(config.get("eos_token"))
    return SpecialTokens(
        bos_token=_token_text(config.get("bos_token")),
        eos_token=eos_token,
        eos_token_id=_added_token_id(folder, config, eos_token) if eos_token is not None else None,
    )


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added_token_id(folder: Path, tokenizer_config: Json, text: str) -> int | None:
    for token_id, token in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if _token_text(token) == text:
            return int(token_id)
    for token in read_optional_json(folder / "tokenizer.json").get("added_tokens") or []:
        if token.get("content") == text:
            return int(token["id"])
    return None


def read_eos_token_ids(config: Mapping[str, Any], folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    """Every id that ends a generation: of `generation_config.json` (else of `config.json`) and the tokenizer's own."""
    stated = read_optional_json(folder / "generation_config.json").get("eos_token_id")
    if stated is None:
        stated = config.get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    if tokenizer_eos is not None:
        ids = [*ids, tokenizer_eos]
    return tuple(dict.fromkeys(int(token_id) for token_id in ids))


def read_chat_template(folder: Path) -> str | None:
    """Text of the folder's chat template, or None. Of several named ones, `default` or else the first, and `tool_use`
    for conversations with tools."""
    for name in ("chat_template.jinja", "chat_template.json"):
        file = folder / name
        if file.is_file():
            if file.suffix != ".jinja":
                return _template_text(read_json(file).get("chat_template"))
            with_tools = folder / "additional_chat_templates" / "tool_use.jinja"
            return _joined(
                file.read_text(encoding="utf-8"),
                with_tools.read_text(encoding="utf-8") if with_tools.is_file() else None,
            )
    return _template_text(read_optional_json(folder / "tokenizer_config.json").get("chat_template"))


def _template_text(template: Any) -> str | None:
    if isinstance(template, str):
        return template
    if isinstance(template, list) and template:
        named: dict[str, str] = {entry["name"]: entry["template"] for entry in template}
        return _joined(named.get("default", template[0]["template"]), named.get("tool_use"))
    return None


def _joined(plain: str, with_tools: str | None) -> str:
    """One template that is `with_tools` where there are some. At their ends templates lose a line break."""
    if with_tools is None or with_tools == plain:
        return plain
    with_tools, plain = with_tools.removesuffix("\n"), plain.removesuffix("\n")
    return f"{{% if tools %}}{with_tools}{{% else %}}{plain}{{% endif %}}"


# --- safetensors --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """Where one tensor of a checkpoint lies."""

    name: str
    path: Path
    dtype: str
    """As safetensors spells it: F32, F16, BF16, F8_E4M3, I64, …"""
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


def list_safetensors(folder: Path) -> list[Path]:
    """The checkpoint's files: those of the index if there is one, else `model.safetensors`, else all of them.

    Raises ConfigError if there are none, or if the index names one that is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index} has no weight_map")
        shards = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise ConfigError(f"{index} names {len(missing)} missing file(s): {', '.join(missing[:3])}; download again")
        return shards
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{folder} has no *.safetensors files; convert the checkpoint, or start with --load-format dummy to try "
            "its shape with random weights"
        )
    return files


def read_safetensors_header(path: Path) -> list[SafetensorsEntry]:
    """Tensors of one file, after checking that all their bytes are there. Raises ConfigError naming the file.

    Format: https://huggingface.co/docs/safetensors (u64 header length, JSON header, data).
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
            if length is None or 8 + length > size:
                raise ConfigError(f"{path} is truncated inside its header ({size} bytes); download it again")
            if length > _MAX_SAFETENSORS_HEADER_BYTES:
                raise ConfigError(f"{path} is not a safetensors file: its header would be {length} bytes long")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is not a safetensors file: its header is no JSON object")
    try:
        return [
            _safetensors_entry(path, name, info, data_start=8 + length, size=size)
            for name, info in header.items()
            if name != "__metadata__"
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: its header has a malformed entry ({error!r})") from error


def _safetensors_entry(path: Path, name: str, info: Json, data_start: int, size: int) -> SafetensorsEntry:
    begin, end = info["data_offsets"]
    if data_start + end > size:
        raise ConfigError(
            f"{path} is truncated: tensor {name} ends at byte {data_start + end}, the file has {size}; "
            "download it again"
        )
    return SafetensorsEntry(name, path, info["dtype"], tuple(info["shape"]), data_start + begin, end - begin)
