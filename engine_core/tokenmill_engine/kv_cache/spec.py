"""How the KV cache of a layer is laid out, declared by the model. Torch-free.

Layers with equal specs that share block tables form a group; tables are indexed by group everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of one layer. `window` is a sliding window in tokens or None; a windowed layer still keeps
    every block for now, the mask does the windowing."""

    kind: Literal["full"]
    num_kv_heads: int
    head_dim: int
    dtype: Literal["float32", "bfloat16", "float16"]
    """That of the model. The kernels read and write float8_e4m3fn as well, by scales that layers do not have yet
    (`ops.rotary_kv_write` and `ops.paged_attention`, both called for `attention.paged`), so no flag leads there:
    `--kv-cache-dtype` other than auto is refused."""
    window: int | None = None

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of this layer, keys and values together."""
        return 2 * block_size * self.num_kv_heads * self.head_dim * _DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table."""

    layers: tuple[int, ...]
    specs: tuple[KVSpec, ...]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers of the group."""
        return sum(spec.block_bytes(block_size) for spec in self.specs)


def group_layers(specs: Sequence[KVSpec]) -> tuple[KVGroup, ...]:
    """One group of all layers: every layer keeps one block per `block_size` tokens."""
    return (KVGroup(layers=tuple(range(len(specs))), specs=tuple(specs)),)
