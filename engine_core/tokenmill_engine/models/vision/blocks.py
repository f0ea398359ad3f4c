"""What the layers of vision encoders are made of.

Workers that have an encoder between them have the heads and the widths of its feed-forward blocks, which need not
divide, and add up after each pair of matrices; all the rest is on each of them. `placement.group` says who they are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tokenmill_engine.distributed.group import Group
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.mlp import GatedMLP
from tokenmill_engine.layers.placement import Placement, Share, Target, whole
from tokenmill_engine.models.vision.packed import PackedRuns
from tokenmill_kernels import ops

_UNIT, _FEWEST_UNITS = 64, 4
"""Widths are shared out in pieces of so many, if each worker gets so many of them."""

SumShape = tuple[int, int]
"""[num_rows, width] of what workers add up."""

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "quick_gelu": _quick_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "silu": F.silu,
}


class LayerNorm:
    """Mean and variance to 0 and 1, times a weight, plus a bias (arXiv:1607.06450)."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight, self.bias, self.eps = placement.empty(size), placement.empty(size), eps

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        yield f"{name}.weight", Target.of_whole(self.weight)
        yield f"{name}.bias", Target.of_whole(self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, size] -> the same."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RowNorm:
    """Root-mean-square norm of rows that nothing is added to."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        self.weight, self.eps = placement.empty(size), eps

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place)."""
        yield f"{name}.weight", Target.of_whole(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, size] -> the same."""
        return ops.rms_norm(x, self.weight, self.eps)


class PlainMLP:
    """second(activation(first(x))), both with a bias if there is one."""

    def __init__(
        self,
        sizes: tuple[int, int, int],
        names: tuple[str, str],
        activation: str,
        placement: Placement,
        has_bias: bool = True,
    ) -> None:
        width, out = whole(sizes[0]), whole(sizes[2])
        inner = _inner_share(sizes[1], placement)
        self._activation = ACTIVATIONS[activation]
        self._linears = (
            Linear(width, {names[0]: inner}, has_bias, placement),
            Linear(inner, {names[1]: out}, has_bias, placement),
        )
        self._out, self._group = sizes[2], placement.group

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        for linear in self._linears:
            yield from linear.targets(prefix)

    def finalize(self) -> None:
        """Packs the loaded weights."""
        for linear in self._linears:
            linear.finalize()

    def sums(self, num_rows: int) -> Iterator[SumShape]:
        """What is added up over the workers for so many rows, in order."""
        yield num_rows, self._out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, width] -> [num_rows, out]."""
        first, second = self._linears
        return _total(second(self._activation(first(x))), self._group)


class SiluMLP:
    """The gated block of decoders, as a layer of an encoder has it: with biases."""

    def __init__(self, width: int, inner: int, placement: Placement) -> None:
        self._mlp = GatedMLP(width, inner, True, placement, _inner_share(inner, placement))
        self._width, self._group = width, placement.group

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        return self._mlp.targets(prefix)

    def finalize(self) -> None:
        """Packs the loaded weights."""
        self._mlp.gate_up_proj.finalize()
        self._mlp.down_proj.finalize()

    def sums(self, num_rows: int) -> Iterator[SumShape]:
        """As in `PlainMLP`."""
        yield num_rows, self._width

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, width] -> the same."""
        return _total(self._mlp(x), self._group)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """How a checkpoint calls the parts of a layer. Queries, keys and values are one matrix or three."""

    first_norm: str
    attention: str
    inputs: Sequence[str]
    output: str
    second_norm: str


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [num_rows, head_dim / 2]."""


class EncoderLayer:
    """Attention and feed-forward, each behind a norm and added to what goes through."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        norms: tuple[LayerNorm, LayerNorm] | tuple[RowNorm, RowNorm],
        mlp: PlainMLP | SiluMLP,
        names: LayerNames,
        placement: Placement,
    ) -> None:
        heads = placement.even(num_heads)
        self._width, self._num_heads, self._names, self._group = width, heads.count, names, placement.group
        self._first_norm: LayerNorm | RowNorm = norms[0]
        self._second_norm: LayerNorm | RowNorm = norms[1]
        self._heads = heads.times(width // num_heads)
        self._qkv = Linear(whole(width), dict.fromkeys(("q", "k", "v"), self._heads), True, placement)
        self._output = Linear(self._heads, {names.output: whole(width)}, True, placement)
        self._mlp = mlp

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        names = self._names
        yield from self._first_norm.targets(f"{prefix}{names.first_norm}")
        yield from self._qkv_targets(f"{prefix}{names.attention}.")
        yield from self._output.targets(f"{prefix}{names.attention}.")
        yield from self._second_norm.targets(f"{prefix}{names.second_norm}")
        yield from self._mlp.targets(f"{prefix}mlp.")

    def _qkv_targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        weight, bias, names = self._qkv.plain_weight, self._qkv.bias, self._names.inputs
        assert bias is not None
        num_each = 3 // len(names)
        pairs = zip(weight.chunk(len(names)), bias.chunk(len(names)), strict=True)
        for name, (rows, values) in zip(names, pairs, strict=True):
            yield f"{prefix}{name}.weight", Target(rows, (self._heads, whole(weight.shape[1])), num_each)
            yield f"{prefix}{name}.bias", Target(values, (self._heads,), num_each)

    def finalize(self) -> None:
        """Packs the loaded weights."""
        self._qkv.finalize()
        self._output.finalize()
        self._mlp.finalize()

    def sums(self, num_rows: int) -> Iterator[SumShape]:
        """As in `PlainMLP`."""
        yield num_rows, self._width
        yield from self._mlp.sums(num_rows)

    def __call__(self, x: torch.Tensor, runs: PackedRuns, rotation: Rotation | None = None) -> torch.Tensor:
        """[num_rows, width] -> the same. Rows attend within their run."""
        q, k, v = self._qkv(self._first_norm(x)).view(len(x), 3, self._num_heads, -1).unbind(1)
        if rotation is not None:
            q, k = ops.rotate_rows(q, k, *rotation)
        x = x + _total(self._output(runs.attend(q, k, v)), self._group)
        return x + self._mlp(self._second_norm(x))


def _inner_share(inner: int, placement: Placement) -> Share:
    """A worker's part of the width between two matrices. Kernels like whole pieces."""
    is_wide = inner >= placement.group.size * _FEWEST_UNITS * _UNIT
    return placement.even(inner, _UNIT if is_wide else 1)


def _total(part: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of what all workers have of it. May overwrite `part`."""
    return part if group.size == 1 else group.all_reduce(part)
