"""Attention backends by name, and which of them can serve a model on a device. Torch-free: checked before loading.

vLLM's names ask for their counterparts, where there are none for the default. `auto` takes what measurements favour:
the kernels that are built in for the device.
"""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tokenmill_engine.config.device import DeviceInfo
from tokenmill_engine.config.engine import DtypeName
from tokenmill_engine.errors import ConfigError

logger = logging.getLogger(__name__)

AttentionBackendName = Literal["triton", "native", "flash-attn-4"]

ATTENTION_BACKENDS: tuple[AttentionBackendName, ...] = ("triton", "native", "flash-attn-4")

_VLLM_COUNTERPARTS: dict[str, AttentionBackendName] = {
    "triton-attn": "triton",
    "flash-attn": "flash-attn-4",
    "cpu-attn": "native",
    "torch-sdpa": "native",
}
_VLLM_OTHERS = (
    *("flashinfer", "flex-attention", "tree-attn", "xformers", "flash-attn-diffkv", "turboquant", "custom"),
    *("no-attention", "dual-chunk-flash-attn", "differential-flash-attn", "block-sparse-flash-attn"),
    *("flashmla", "flashmla-sparse", "flashinfer-mla", "flashinfer-mla-sparse", "flash-attn-mla", "cutlass-mla"),
    *("triton-mla", "triton-mla-sparse", "xpu-mla-sparse", "rocm-flash", "rocm-attn", "rocm-aiter-fa"),
    *("rocm-aiter-unified-attn", "rocm-aiter-mla", "rocm-aiter-mla-sparse", "rocm-aiter-triton-mla"),
    *("ipex", "openvino", "pallas", "hpu-attn"),
)
VLLM_NAMES: MappingProxyType[str, AttentionBackendName | None] = MappingProxyType(
    {**_VLLM_COUNTERPARTS, **dict.fromkeys(_VLLM_OTHERS)}
)
"""Names of vLLM, of today and earlier, in lower case with dashes, and the counterpart here, if there is one."""

_VLLM_SUFFIX = "-vllm-v1"
_MAX_FLASH_HEAD_DIM = 256
_FLASH_CAPABILITIES = range(8, 13)


def parse_attention_backend(value: object) -> str:
    """A backend's name as `ATTENTION_BACKENDS` spells it, `auto`, or a key of `VLLM_NAMES`, from any spelling.

    Raises:
        ValueError: nothing has this name; completes "must be ...".
    """
    name = value.strip().lower().replace("_", "-").removesuffix(_VLLM_SUFFIX) if isinstance(value, str) else ""
    if name not in ("auto", *ATTENTION_BACKENDS, *VLLM_NAMES):
        raise ValueError(f"one of auto, {', '.join(ATTENTION_BACKENDS)}")
    return name


def resolve_attention_backend(
    requested: str, origin: str, device: DeviceInfo, head_dim: int, dtype: DtypeName
) -> AttentionBackendName | Literal["auto"]:
    """The backend to use for a result of `parse_attention_backend`, which came from `origin`.

    `auto` stays: it alone lets PyTorch's operators serve where the C++ library cannot. What is asked for by a name of
    vLLM never ends a start: what is built in becomes `auto` too, and where nothing here answers to the name, one
    warning says what is used.

    Raises:
        ConfigError: the one of ours that is asked for cannot serve; the message lists every reason and what can.
    """
    built_in: AttentionBackendName = "native" if device.kind == "cpu" else "triton"
    if requested in VLLM_NAMES:
        counterpart = VLLM_NAMES[requested]
        if counterpart == built_in:
            return "auto"
        obstacles = ["Tokenmill has no such backend"]
        if counterpart is not None:
            obstacles = [f"{counterpart}: {text}" for text in _obstacles(counterpart, device, head_dim, dtype)]
        if counterpart is not None and not obstacles:
            return counterpart
        name = requested.upper().replace("-", "_")
        logger.warning("%s %s is replaced by %s (%s)", origin, name, built_in, "; ".join(obstacles))
        return "auto"
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
    return "auto"


def _obstacles(name: AttentionBackendName, device: DeviceInfo, head_dim: int, dtype: DtypeName) -> Iterator[str]:
    """Why the backend cannot serve; nothing if it can."""
    if name == "native":
        if device.kind != "cpu":
            yield "it runs on a CPU only"
        if dtype == "float16":
            yield "it computes in float32 or bfloat16, not in float16"
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
