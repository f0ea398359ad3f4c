"""Causal attention of one layer over the paged cache: rotates, stores keys and values, attends."""

from dataclasses import dataclass

import torch

from tokenmill_engine.attention.backend import AttentionBackend, LayerInputs
from tokenmill_engine.attention.batch import AttentionShape, ForwardBatch
from tokenmill_kernels import ops


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm weights [head_dim] applied to every query and key head before rotation."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """One layer's attention. `group` is the KV group whose block tables the layer uses."""

    shape: AttentionShape
    group: int
    backend: AttentionBackend

    def __call__(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[num_tokens, (num_heads + 2 num_kv_heads) * head_dim] -> [num_tokens, num_heads * head_dim].

        Writes the keys and values of the batch to the cache, and rotates `qkv` in place. The step must be planned.
        """
        shape, num_tokens = self.shape, qkv.shape[0]
        heads = qkv.view(num_tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        first_key, first_value = shape.num_heads, shape.num_heads + shape.num_kv_heads
        q, k, v = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
        group = batch.groups[self.group]
        k_cache, v_cache = kv_cache
        ops.rotary_kv_write(
            q,
            k,
            v,
            cos_sin,
            batch.positions,
            group.slot_mapping,
            k_cache,
            v_cache,
            q_norm=norms.query if norms is not None else None,
            k_norm=norms.key if norms is not None else None,
            eps=norms.eps if norms is not None else 0.0,
            # The launch before this one is the projection; what the step's inputs are was settled long before.
            early=True,
        )
        attended = self.backend.attend(LayerInputs(q, k_cache, v_cache, group, shape), batch)
        return attended.reshape(num_tokens, shape.num_heads * shape.head_dim)
