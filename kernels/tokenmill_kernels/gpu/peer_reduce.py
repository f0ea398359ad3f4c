"""Launches the kernels that sum and gather over the GPUs of one host.

One-shot: every member sends all of its numbers to every other one, and adds up all of them. Two-shot: of each group of
rows a member adds up one, and sends the sum to the others: twice the latency, but less to send if members are many.

Every member makes the same calls with tensors of the same shapes and dtypes (bfloat16, float16, float32). A call with
`overlap` may start while the kernel before it ends, and lets the next one do so (`launch.dependent_launch`).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tokenmill_kernels.gpu.launch import COMPILE_OPTIONS, device_limits, launch_options
from tokenmill_kernels.gpu.peer_kernels import gather_kernel, one_shot_kernel, two_shot_kernel
from tokenmill_kernels.gpu.peer_protocol import UNIT_BYTES, Peers

_CHUNK_BYTES = 4096
"""What is summed without a norm, or gathered, goes in pieces of this size."""
_BYTES_PER_THREAD, _MAX_WARPS = 16, 16
_MIN_BLOCK_BYTES = 32 * _BYTES_PER_THREAD
"""Of a row there is something for each thread. If threads held the same numbers, some might see them come before others
do, and leave a loop alone."""
_UNIT = 16
"""So many numbers, or a multiple, are read and written by vectors."""
_MAX_TILE_ROWS, _MAX_TILE_ITEMS = 4, 16384
_BITS = {2: tl.int16, 4: tl.int32}


@dataclass(frozen=True, slots=True)
class _Rows:
    """How programs see what is summed."""

    num_rows: int
    width: int
    num_items: int | None = None
    """Of rows side by side without gaps the first so many numbers count; of others all."""

    @classmethod
    def chunks(cls, x: torch.Tensor) -> "_Rows":
        """`x` is contiguous."""
        width = _CHUNK_BYTES // x.element_size()
        return cls(triton.cdiv(x.numel(), width), width, x.numel())

    @property
    def unit(self) -> int:
        """As the kernels take it."""
        if self.num_items is None:
            return 0
        return _UNIT if self.num_items % _UNIT == 0 else 1

    @property
    def num_units(self) -> int:
        return (self.num_items or 0) // max(self.unit, 1)

    def stride(self, x: torch.Tensor | None) -> int:
        if x is None:
            return 0
        return x.stride(0) if self.num_items is None else self.width

    def row_size(self, item_bytes: int) -> int:
        """Numbers from row to row of a slot."""
        row_bytes: int = triton.cdiv(self.width * item_bytes, UNIT_BYTES) * UNIT_BYTES
        return row_bytes // item_bytes

    def slot_bytes(self, item_bytes: int, size: int, two_shot: bool) -> int:
        num_rows = 2 * triton.cdiv(self.num_rows, size) * size if two_shot else size * self.num_rows
        return num_rows * self.row_size(item_bytes) * item_bytes


def norm_slot_bytes(x: torch.Tensor, size: int, two_shot: bool) -> int:
    """What `add_rms_norm` of `x` fills of a slot."""
    return _Rows(*x.shape).slot_bytes(x.element_size(), size, two_shot)


def flat_slot_bytes(x: torch.Tensor, size: int, two_shot: bool) -> int:
    """What `all_reduce` of `x`, or as one-shot `all_gather`, fills of a slot."""
    return _Rows.chunks(x).slot_bytes(x.element_size(), size, two_shot)


@dataclass(frozen=True, slots=True)
class _Norm:
    """What follows a sum; nothing if there is no weight."""

    residual: torch.Tensor | None = None
    total: torch.Tensor | None = None
    """Takes what is normed."""
    weight: torch.Tensor | None = None
    eps: float = 0.0


def all_reduce(x: torch.Tensor, peers: Peers, two_shot: bool, overlap: bool = False) -> torch.Tensor:
    """`x`, contiguous, overwritten with the sum of all members' x: added in float32 and rounded once."""
    assert x.is_contiguous()
    if x.numel():
        _launch(x, x, _Norm(), _Rows.chunks(x), peers, two_shot, overlap)
    return x


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    peers: Peers,
    two_shot: bool,
    overlap: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(residual), residual) after residual += sum of all members' x, in place; the norm in `out` if that is
    given. Without a residual the sum itself, in new memory, takes its place. x [T, N] and the others with contiguous
    rows; `x` stays as it is."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is None else residual
    assert x.stride(1) == out.stride(1) == total.stride(1) == 1
    if x.numel():
        _launch(out, x, _Norm(residual, total, weight, eps), _Rows(*x.shape), peers, two_shot, overlap)
    return out, total


def all_gather(x: torch.Tensor, peers: Peers, overlap: bool = False) -> torch.Tensor:
    """[T, n] of each member, contiguous -> [T, size * n], by rank along the last dimension."""
    assert x.is_contiguous()
    num_rows, width = x.shape
    out = torch.empty((num_rows, peers.size * width), dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    rows = _Rows.chunks(x)
    # There may be more to empty than to gather: a sum of as many rows has most likely come before.
    num_programs = min(max(rows.num_rows, num_rows), device_limits(x.device).num_sms)
    gather_kernel[(num_programs,)](
        out, x, peers.addresses, peers.state, rows.num_units, _filled(rows, x, peers, False), width, peers.rank,
        peers.slot_bytes, size=peers.size, block=rows.width, unit=rows.unit, bits=_BITS[x.element_size()],
        num_warps=_num_warps(_CHUNK_BYTES), num_stages=1, **_options(x.device, overlap),
    )  # fmt: skip
    return out


def _launch(
    out: torch.Tensor, x: torch.Tensor, norm: _Norm, rows: _Rows, peers: Peers, two_shot: bool, overlap: bool
) -> None:
    item_bytes = x.element_size()
    block = max(triton.next_power_of_2(rows.width), _MIN_BLOCK_BYTES // item_bytes)
    # As many programs as find room at once: they wait for those of other members.
    max_programs = device_limits(x.device).num_sms
    if two_shot:
        kernel, tile = (
            two_shot_kernel,
            min(triton.next_power_of_2(peers.size), _MAX_TILE_ROWS, max(_MAX_TILE_ITEMS // block, 1)),
        )
        num_programs = triton.cdiv(rows.num_rows, peers.size)
    else:
        kernel, tile = one_shot_kernel, 1 if rows.num_rows <= max_programs else 2
        num_programs = triton.cdiv(rows.num_rows, tile)
    kernel[(min(num_programs, max_programs),)](
        out, norm.total, x, norm.residual, norm.weight, peers.addresses, peers.state, rows.num_rows,
        rows.num_units, _filled(rows, x, peers, two_shot), peers.rank, rows.stride(x),
        rows.stride(norm.residual), rows.stride(out), rows.stride(norm.total), peers.slot_bytes, norm.eps,
        size=peers.size, width=rows.width, row_size=rows.row_size(item_bytes), block=block, tile=tile, unit=rows.unit,
        bits=_BITS[item_bytes], num_warps=_num_warps(block * item_bytes), num_stages=1,
        **_options(x.device, overlap),
    )  # fmt: skip


def _filled(rows: _Rows, x: torch.Tensor, peers: Peers, two_shot: bool) -> int:
    """Units of a slot."""
    num_bytes = rows.slot_bytes(x.element_size(), peers.size, two_shot)
    assert num_bytes <= peers.slot_bytes
    return num_bytes // UNIT_BYTES


def _num_warps(row_bytes: int) -> int:
    return min(max(row_bytes // (32 * _BYTES_PER_THREAD), 1), _MAX_WARPS)


def _options(device: torch.device, overlap: bool) -> dict[str, object]:
    return launch_options(device) if overlap else {**COMPILE_OPTIONS, "pdl": False}
