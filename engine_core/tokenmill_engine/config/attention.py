"""Attention backends by name, and which of them can serve a model on a device. Torch-free: checked before loading.

vLLM's names are understood where there is a counterpart. `auto` takes what measurements favour: the kernels that are
built in for the device.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tokenmill_engine.config.device import DeviceInfo
from tokenmill_engine.config.engine import DtypeName
from tokenmill_engine.errors import ConfigError

AttentionBackendName = Literal["triton", "native", "flash-attn-4"]

ATTENTION_BACKENDS: tuple[AttentionBackendName, ...] = ("triton", "native", "flash-attn-4")

VLLM_NAMES: MappingProxyType[str, str] = MappingProxyType(
    {
        "triton-attn": "triton",
        "triton-attn-vllm-v1": "triton",
        "flash-attn": "flash-attn-4",
        "flash-attn-vllm-v1": "flash-attn-4",
        "cpu-attn": "native",
        "torch-sdpa": "native",
        "torch-sdpa-vllm-v1": "native",
        "xformers": "auto",
    }
)
"""vLLM's names, in lower case with dashes, and what serves in their place."""

RETIRED_NAMES = frozenset({"xformers"})
"""Names of what no longer exists; asking for it changes nothing."""

_MAX_FLASH_HEAD_DIM = 256
_FLASH_CAPABILITIES = range(8, 13)


def parse_attention_backend(value: object) -> str:
    """A backend's name as `ATTENTION_BACKENDS` spells it, `auto`, or one of `RETIRED_NAMES`, from any spelling.

    Raises:
        ValueError: nothing has this name; completes "must be ...".
    """
    name = value.strip().lower().replace("_", "-") if isinstance(value, str) else ""
    if name in RETIRED_NAMES:
        return name
    name = VLLM_NAMES.get(name, name)
    if name not in ("auto", *ATTENTION_BACKENDS):
        raise ValueError(f"one of auto, {', '.join(ATTENTION_BACKENDS)}")
    return name


def resolve_attention_backend(
    requested: str, origin: str, device: DeviceInfo, head_dim: int, dtype: DtypeName
) -> AttentionBackendName:
    """The backend to use for a result of `parse_attention_backend`, which came from `origin`.

    Raises:
        ConfigError: the one that is asked for cannot serve; the message lists every reason and what can.
    """
    built_in: AttentionBackendName = "native" if device.kind == "cpu" else "triton"
    for name in ATTENTION_BACKENDS:
        if name != requested:
            continue
        obstacles = list(_obstacles(name, device, head_dim, dtype))
        if not obstacles:
            return name
        able = [other for other in ATTENTION_BACKENDS if next(_obstacles(other, device, head_dim, dtype), None) is None]
        raise ConfigError(
            f"{origin} asks for {name}, which cannot serve this model here: {'; '.join(obstacles)}; "
            f"use --attention-backend {' or '.join(['auto', *able])}"
        )
    return built_in


def _obstacles(name: AttentionBackendName, device: DeviceInfo, head_dim: int, dtype: DtypeName) -> Iterator[str]:
    """Why the backend cannot serve; nothing if it can."""
    if name == "native":
        if device.kind != "cpu":
            yield "it runs on a CPU only"
        return
    if device.kind != "cuda":
        yield "it needs an NVIDIA GPU"
    if name == "triton":
        return
    if dtype == "float32":
        yield "it computes in bfloat16 or float16, not in float32"
    if head_dim % 8 or head_dim > _MAX_FLASH_HEAD_DIM:
        yield f"it takes heads of a multiple of 8 up to {_MAX_FLASH_HEAD_DIM}, these have {head_dim}"
    capability = device.compute_capability
    if capability is not None and capability[0] not in _FLASH_CAPABILITIES:
        yield f"it does not know GPUs of compute capability {capability[0]}.{capability[1]}"
    if not _has_flash_attention():
        yield "the Python package flash-attn-4 is not installed"


def _has_flash_attention() -> bool:
    """Whether `flash_attn.cute` is there, found without importing it: that would load torch."""
    spec = importlib.util.find_spec("flash_attn")
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)
