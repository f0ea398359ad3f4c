"""What computes attention. A backend plans a step once and then serves every layer of it."""

from dataclasses import dataclass
from typing import Protocol

import torch

from tokenmill_engine.attention.batch import AttentionShape, ForwardBatch, KVGroupBatch
from tokenmill_kernels import ops


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What one layer attends with."""

    q: torch.Tensor
    """[num_tokens, num_heads, head_dim], rotated; may be a strided view."""
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    """As `ops.allocate_kv_cache` makes them, with the batch's keys and values written already."""
    group: KVGroupBatch
    """Block tables that belong to the caches."""
    shape: AttentionShape


class AttentionBackend(Protocol):
    """Nothing here waits for the device; what the kernels of a captured step do follows from device memory alone."""

    @property
    def name(self) -> str:
        """For the log, and for users to choose it by."""

    def plan(self, batch: ForwardBatch, shape: AttentionShape, dtype: torch.dtype) -> ops.AttentionPlan | None:
        """How the step is divided, for all layers of this shape; goes to `ForwardBatch.plans`."""

    def attend(self, layer: LayerInputs, batch: ForwardBatch) -> torch.Tensor:
        """Causal attention of the batch's tokens over the cache, [num_tokens, num_heads, head_dim]. Rows of tokens
        that no request owns are undefined."""


@dataclass(frozen=True, slots=True)
class BuiltInAttention:
    """The kernels of `tokenmill_kernels`: Triton on a GPU; on a CPU the C++ library, or torch where there is none."""

    name: str

    def plan(self, batch: ForwardBatch, shape: AttentionShape, dtype: torch.dtype) -> ops.AttentionPlan | None:
        return ops.plan_attention(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            num_tokens=batch.num_tokens,
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
            window=shape.window,
        )

    def attend(self, layer: LayerInputs, batch: ForwardBatch) -> torch.Tensor:
        return ops.paged_attention(
            layer.q,
            layer.k_cache,
            layer.v_cache,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_tables=layer.group.block_tables,
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=layer.shape.scale,
            window=layer.shape.window,
            plan=batch.plans[layer.shape],
        )
