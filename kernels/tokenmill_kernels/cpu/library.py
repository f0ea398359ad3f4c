"""Loads the C++ library and declares its functions; the Python mirror of `csrc/api.h`.

The library is optional: `load()` gives None, after one warning, where it can be neither found nor built.
"""

import ctypes
import logging
import os
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from tokenmill_kernels.cpu.build import BuildError, build

logger = logging.getLogger(__name__)

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""Element types the library computes with, by its code for them."""


class CacheStruct(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("block_stride", c_int64),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
    )


class HeadsStruct(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64))


class AttentionShapeStruct(ctypes.Structure):
    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
    )


class AttentionBatchStruct(ctypes.Structure):
    _fields_ = (
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_requests", c_int32),
    )


class RotaryStruct(ctypes.Structure):
    _fields_ = (
        ("q", HeadsStruct),
        ("k", HeadsStruct),
        ("v", HeadsStruct),
        ("keys", CacheStruct),
        ("values", CacheStruct),
        ("cos_sin", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("eps", c_float),
        ("rotary_dim", c_int32),
        ("num_tokens", c_int32),
    )


class AttentionStruct(ctypes.Structure):
    _fields_ = (
        ("q", HeadsStruct),
        ("out", HeadsStruct),
        ("keys", CacheStruct),
        ("values", CacheStruct),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
    )


class LinearStruct(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("num_rows", c_int32),
        ("in_features", c_int32),
        ("out_features", c_int32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
    )


class DecoderShapeStruct(ctypes.Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_layers", c_int32),
        ("vocab_size", c_int32),
        ("rotary_dim", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("cos_sin", c_void_p),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("attention", AttentionShapeStruct),
    )


class DecoderLayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("output", c_void_p),
        ("output_bias", c_void_p),
        ("post_attention_norm", c_void_p),
        ("gate_up", c_void_p),
        ("gate_bias", c_void_p),
        ("up_bias", c_void_p),
        ("down", c_void_p),
        ("down_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", CacheStruct),
        ("values", CacheStruct),
        ("window", c_int32),
    )


class StepStruct(ctypes.Structure):
    _fields_ = (
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("output_rows", c_void_p),
        ("out", c_void_p),
        ("embeddings", c_void_p),
        ("cos_sin", c_void_p),
        ("added", c_void_p),
        ("added_tokens", c_void_p),
        ("added_stride", c_int64),
        ("num_added", c_int32),
        ("num_added_layers", c_int32),
        ("num_tokens", c_int32),
        ("num_outputs", c_int32),
        ("attention", AttentionBatchStruct),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "set_num_threads": (None, (c_int32,)),
    "num_threads": (c_int32, ()),
    "pack": (None, (c_int32, c_void_p, c_int64, c_int32, c_int32, c_int32, c_int32, c_void_p)),
    "packed_rows": (None, (c_int32, c_void_p, c_int32, c_void_p, c_int32, c_void_p)),
    "linear": (None, (POINTER(LinearStruct),)),
    "linear_argmax": (c_int32, (POINTER(LinearStruct),)),
    "rms_norm": (None, (c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_int32, c_float)),
    "add_rms_norm": (
        None,
        (c_int32, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int32, c_int32, c_float),
    ),
    "silu_mul": (None, (c_int32, c_void_p, c_int64, c_void_p, c_int32, c_int32)),
    "rotary_kv_write": (None, (c_int32, POINTER(AttentionShapeStruct), POINTER(RotaryStruct))),
    "paged_attention": (
        c_int32,
        (c_int32, POINTER(AttentionShapeStruct), POINTER(AttentionBatchStruct), POINTER(AttentionStruct)),
    ),
    "decoder_create": (c_void_p, (POINTER(DecoderShapeStruct), POINTER(DecoderLayerStruct))),
    "decoder_destroy": (None, (c_void_p,)),
    "decoder_forward": (c_int32, (c_void_p, POINTER(StepStruct))),
}


@cache
def _open() -> ctypes.CDLL | str:
    """The library without its signatures, built first if need be; or why there is none."""
    try:
        return ctypes.CDLL(str(build()))
    except (BuildError, OSError) as error:
        return str(error)


def obstacle(dtype: torch.dtype) -> str | None:
    """Why the library cannot compute with `dtype` here; None if it can."""
    if dtype not in DTYPE_CODES:
        return f"they compute in float32 or bfloat16, not in {str(dtype).removeprefix('torch.')}"
    library = _open()
    return library if isinstance(library, str) else None


@cache
def load() -> ctypes.CDLL | None:
    """The library, built first if need be, with as many threads as this process may use processors; None without it.

    Its functions are attributes: `load().tokenmill_linear(...)`. They release the GIL.
    """
    library = _open()
    if isinstance(library, str):
        logger.warning(
            "CPU kernels are not available, PyTorch operators do their work several times slower: %s", library
        )
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"tokenmill_{name}")
        function.restype = result
        function.argtypes = arguments
    library.tokenmill_set_num_threads(_num_processors())
    return library


def _num_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_num_threads(count: int) -> None:
    """How many threads the library computes with, the calling one included. Nothing happens without the library."""
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, not {count}")
    library = load()
    if library is not None:
        library.tokenmill_set_num_threads(count)


def num_threads() -> int:
    """How many threads the library computes with; 1 without it."""
    library = load()
    return int(library.tokenmill_num_threads()) if library is not None else 1


def check(status: int) -> None:
    """Raises MemoryError for the status that a library function returns when memory ran out."""
    if status != 0:
        raise MemoryError("the CPU kernels could not allocate their working memory")
