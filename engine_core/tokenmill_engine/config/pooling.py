"""How a model makes one vector of a text, as sentence-transformers writes it beside a model. Torch-free."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.errors import ConfigError

PoolingKind = Literal["last", "mean", "cls"]

_KINDS: dict[str, PoolingKind] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
_SWITCH = re.compile(r"^pooling_mode_(.+?)(?:_tokens?)?$")
"""Older files have one for each kind."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Requests ask for vectors, never for text."""

    kind: PoolingKind
    """What the vector is made of: the last token's final hidden state, the first one's, or the mean of all."""
    normalize: bool = True
    """Vectors have length 1 unless a request wants something else."""
    scores_pairs: bool = False
    """Of pairs of texts the model makes one number, and no vectors."""
    squash: bool = True
    """These numbers are brought between 0 and 1 unless a request wants something else."""


@dataclass(frozen=True, slots=True)
class SentenceModel:
    """How vectors are made with a model."""

    pooling: PoolingConfig
    max_tokens: int | None = None
    """Longest text that it was made for."""


def default_pooling(architecture: ArchitectureConfig, config: Mapping[str, Any]) -> PoolingConfig | None:
    """Of a model without files of sentence-transformers; None for one that generates text. `config` is its
    `config.json`, where sentence-transformers says of models for pairs whether a sigmoid follows."""
    if architecture.has_output_embeddings:
        return None
    if architecture.text_encoder is None:
        return PoolingConfig("last")
    told = (config.get("sentence_transformers") or {}).get("activation_fn")
    told = told or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    if not architecture.text_encoder.scores_pairs:
        return PoolingConfig("cls")
    return PoolingConfig("cls", scores_pairs=True, squash=not str(told).endswith("Identity"))


def read_sentence_model(folder: Path) -> SentenceModel | None:
    """What `modules.json` and the files that it names say; None for a folder without one.

    Raises ConfigError for modules that are not supported.
    """
    if not (folder / "modules.json").is_file():
        return None
    modules = _read(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ConfigError(f"{folder / 'modules.json'} must hold a list of objects")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if unknown:
        raise ConfigError(
            f"{folder / 'modules.json'} has a module {unknown[0]!r}; supported are Transformer, Pooling and Normalize"
        )
    if "Pooling" not in kinds:
        return None
    file = folder / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json"
    limit = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
    return SentenceModel(
        PoolingConfig(_pooling_kind(file), normalize="Normalize" in kinds),
        limit if isinstance(limit, int) and limit > 0 else None,
    )


def _pooling_kind(file: Path) -> PoolingKind:
    config = _optional(file)
    if "pooling_mode" in config:
        wanted = [str(config["pooling_mode"])]
    else:
        wanted = [match[1] for key, value in config.items() if value is True and (match := _SWITCH.match(key))]
    if len(wanted) != 1 or wanted[0] not in _KINDS:
        asked = ", ".join(wanted) or "nothing"
        raise ConfigError(f"{file} asks for {asked}; supported is one of {', '.join(_KINDS)}")
    return _KINDS[wanted[0]]


def _optional(file: Path) -> dict[str, Any]:
    value = _read(file) if file.is_file() else {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file} must hold a JSON object")
    return value


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from error
