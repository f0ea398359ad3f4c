"""Random tokens and log-probabilities from rows of logits, and masks of them, by the C++ library: some ten times as
fast as tensor operators on a CPU. Each row's result depends on that row alone."""

from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from tokenmill_kernels.cpu.library import check, load


class DrawStruct(Structure):
    """Mirrors `TokenmillDraw` of csrc/sample.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("rows", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("u", c_void_p),
        ("tokens", c_void_p),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
    )


class ScoreStruct(Structure):
    """Mirrors `TokenmillScore` of csrc/sample.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("own", c_void_p),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("num_top", c_int32),
    )


class MaskStruct(Structure):
    """Mirrors `TokenmillMask` of csrc/sample.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("row_stride", c_int64),
        ("rows", c_void_p),
        ("bits", c_void_p),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
    )


@dataclass(slots=True)
class DrawParams:
    """One entry for each row that is drawn from."""

    temperature: torch.Tensor
    """float32 [n], above 0"""
    top_k: torch.Tensor
    """int64 [n], at least 1; the vocabulary size keeps all"""
    top_p: torch.Tensor
    """float32 [n]; 1 keeps all"""
    min_p: torch.Tensor
    """float32 [n]; 0 keeps all"""
    u: torch.Tensor
    """float64 [n] in [0, 1)"""


def is_available() -> bool:
    """Whether the library is there."""
    return load() is not None


def draw(logits: torch.Tensor, rows: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Tokens int32 [n] for `rows` (int64 [n]) of `logits` (float32 [num_rows, vocab_size]); -1 where the logits are no
    distribution.

    min_p and top_k cut the distribution after temperature, top_p what they leave of it; tokens that tie with the last
    one kept are kept too. The token is the first, in vocabulary order, at which the running sum of the kept
    probabilities exceeds `u`. `is_available` must hold.
    """
    library = load()
    assert library is not None
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or rows.dtype != torch.int64:
        raise TypeError(f"expected rows of float32 logits, got {logits.dtype} with {logits.stride()}")
    # Columns of tables come with strides.
    rows, temperature, top_k = rows.contiguous(), params.temperature.contiguous(), params.top_k.contiguous()
    top_p, min_p, u = params.top_p.contiguous(), params.min_p.contiguous(), params.u.contiguous()
    tokens = torch.empty(len(rows), dtype=torch.int32)
    library.tokenmill_draw.argtypes = (POINTER(DrawStruct),)
    struct = DrawStruct(
        logits=logits.data_ptr(),
        row_stride=logits.stride(0),
        rows=rows.data_ptr(),
        temperature=temperature.data_ptr(),
        top_k=top_k.data_ptr(),
        top_p=top_p.data_ptr(),
        min_p=min_p.data_ptr(),
        u=u.data_ptr(),
        tokens=tokens.data_ptr(),
        num_rows=len(rows),
        vocab_size=logits.shape[1],
    )
    check(library.tokenmill_draw(struct))
    return tokens


def score(logits: torch.Tensor, own: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens `own` (int64 [n]) of each row of `logits` (float32 [n, vocab_size]) beside the
    `num_top` most likely ones: ids int32 [n, 1 + num_top], log-probabilities float32 [n, 1 + num_top], and ranks of the
    own tokens int32 [n], 1 for the most likely. Of equal logits the lower id comes first. `is_available` must hold.
    """
    library = load()
    assert library is not None
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or own.dtype != torch.int64:
        raise TypeError(f"expected rows of float32 logits, got {logits.dtype} with {logits.stride()}")
    own = own.contiguous()
    token_ids = torch.empty((len(own), 1 + num_top), dtype=torch.int32)
    logprobs = torch.empty((len(own), 1 + num_top), dtype=torch.float32)
    ranks = torch.empty(len(own), dtype=torch.int32)
    library.tokenmill_score.argtypes = (POINTER(ScoreStruct),)
    struct = ScoreStruct(
        logits=logits.data_ptr(),
        row_stride=logits.stride(0),
        own=own.data_ptr(),
        token_ids=token_ids.data_ptr(),
        logprobs=logprobs.data_ptr(),
        ranks=ranks.data_ptr(),
        num_rows=len(own),
        vocab_size=logits.shape[1],
        num_top=num_top,
    )
    check(library.tokenmill_score(struct))
    return token_ids, logprobs, ranks


def mask(logits: torch.Tensor, rows: torch.Tensor, bits: torch.Tensor) -> None:
    """Give minus infinity to the tokens of `rows` (int32 [n], each once) of `logits` (float32 [num_rows, vocab_size])
    that are not allowed: bit `i % 32` of word `i // 32` of `bits` (int32 [n, ceil(vocab_size / 32)]) is set if token
    `i` is. `is_available` must hold.
    """
    library = load()
    assert library is not None
    num_words = -(-logits.shape[1] // 32)
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or rows.dtype != torch.int32:
        raise TypeError(f"expected rows of float32 logits, got {logits.dtype} with {logits.stride()}")
    if bits.dtype != torch.int32 or bits.shape != (len(rows), num_words):
        raise TypeError(f"expected {num_words} words for each of {len(rows)} rows, got {tuple(bits.shape)}")
    rows, bits = rows.contiguous(), bits.contiguous()
    library.tokenmill_mask.argtypes = (POINTER(MaskStruct),)
    struct = MaskStruct(
        logits=logits.data_ptr(),
        row_stride=logits.stride(0),
        rows=rows.data_ptr(),
        bits=bits.data_ptr(),
        num_rows=len(rows),
        vocab_size=logits.shape[1],
    )
    check(library.tokenmill_mask(struct))
