"""What the layers of vision encoders are made of. Every worker has all of an encoder."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.mlp import GatedMLP
from tokenmill_engine.layers.placement import Placement, Target, whole
from tokenmill_engine.models.vision.packed import PackedRuns
from tokenmill_kernels import ops

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
        width, inner, out = sizes
        self._activation = ACTIVATIONS[activation]
        self._linears = (
            Linear(whole(width), {names[0]: whole(inner)}, has_bias, placement),
            Linear(whole(inner), {names[1]: whole(out)}, has_bias, placement),
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        for linear in self._linears:
            yield from linear.targets(prefix)

    def finalize(self) -> None:
        """Packs the loaded weights."""
        for linear in self._linears:
            linear.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, width] -> [num_rows, out]."""
        first, second = self._linears
        return second(self._activation(first(x)))


class SiluMLP:
    """The gated block of decoders, as a layer of an encoder has it: with biases."""

    def __init__(self, width: int, inner: int, placement: Placement) -> None:
        self._mlp = GatedMLP(width, inner, True, placement)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        return self._mlp.targets(prefix)

    def finalize(self) -> None:
        """Packs the loaded weights."""
        self._mlp.gate_up_proj.finalize()
        self._mlp.down_proj.finalize()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, width] -> the same."""
        return self._mlp(x)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """How a checkpoint calls the parts of a layer. Queries, keys and values are one matrix or three."""

    first_norm: str
    attention: str
    inputs: Sequence[str]
    output: str
    second_norm: str


Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, float32 [num_rows, 1, head_dim]."""


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
        self._num_heads, self._names = num_heads, names
        self._first_norm: LayerNorm | RowNorm = norms[0]
        self._second_norm: LayerNorm | RowNorm = norms[1]
        share = whole(3 * width // len(names.inputs))
        self._qkv = Linear(whole(width), dict.fromkeys(names.inputs, share), True, placement)
        self._output = Linear(whole(width), {names.output: whole(width)}, True, placement)
        self._mlp = mlp

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        names = self._names
        yield from self._first_norm.targets(f"{prefix}{names.first_norm}")
        yield from self._qkv.targets(f"{prefix}{names.attention}.")
        yield from self._output.targets(f"{prefix}{names.attention}.")
        yield from self._second_norm.targets(f"{prefix}{names.second_norm}")
        yield from self._mlp.targets(f"{prefix}mlp.")

    def finalize(self) -> None:
        """Packs the loaded weights."""
        self._qkv.finalize()
        self._output.finalize()
        self._mlp.finalize()

    def __call__(self, x: torch.Tensor, runs: PackedRuns, rotation: Rotation | None = None) -> torch.Tensor:
        """[num_rows, width] -> the same. Rows attend within their run."""
        q, k, v = self._qkv(self._first_norm(x)).view(len(x), 3, self._num_heads, -1).unbind(1)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        x = x + self._output(runs.attend(q, k, v))
        return x + self._mlp(self._second_norm(x))


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """[num_rows, num_heads, head_dim], turned in float32 by halves (arXiv:2104.09864)."""
    cosines, sines = rotation
    values = heads.float()
    first, second = values.chunk(2, dim=-1)
    return (values * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)
