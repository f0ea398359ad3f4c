"""Loads a model the way an engine core does, without an engine core."""

from pathlib import Path
from typing import Any

import torch

from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.distributed.group import Group
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.loader import build_model, load_model, load_weights
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.models.registry import model_class

CPU = torch.device("cpu")


def model_config(name: str | Path | None, **changes: Any) -> ModelConfig:
    """Configuration of a model folder, a file or (None) the embedded model; float32 unless `changes` say otherwise."""
    files = resolve_model(None if name is None else str(name))
    values: dict[str, Any] = {
        "architecture": files.architecture,
        "load_format": "gguf" if files.kind == "gguf" else "safetensors",
        "dtype": "float32",
        "seed": 0,
        "max_model_len": 512,
        "media": files.media,
    }
    return ModelConfig(
        name=files.name,
        path=files.path,
        tokenizer_path=files.tokenizer_path,
        max_model_len_explicit=False,
        eos_token_ids=files.eos_token_ids,
        **(values | changes),
    )


def load_on_cpu(name: str | Path | None, **changes: Any) -> DenseDecoder:
    """The loaded model, on the CPU."""
    return load_model(model_config(name, **changes), CPU)


def load_part(config: ModelConfig, group: Group) -> MediaDecoder:
    """One worker's part of a model that looks at images, on the CPU."""
    model = build_model(config, CPU, group=group)
    assert isinstance(model, MediaDecoder)
    load_weights(model, config)
    model.finalize()
    return model


def load_op_by_op(name: str | Path | None, **changes: Any) -> DenseDecoder:
    """As `load_on_cpu`, but every operator is called by itself even where the layers could run as one call."""
    config = model_config(name, **changes)
    model = model_class(config.architecture.name)(config, CPU)
    load_weights(model, config)
    model.finalize(allow_fused=False)
    return model


def loaded_weights(name: str | Path | None, device: torch.device, **changes: Any) -> dict[str, torch.Tensor]:
    """Every parameter as it was loaded, by its Hugging Face name."""
    config = model_config(name, **changes)
    model = model_class(config.architecture.name)(config, device)
    load_weights(model, config)
    return {name: target.view for name, target in model.targets().items()}
