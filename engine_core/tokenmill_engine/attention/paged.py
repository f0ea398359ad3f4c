"""Causal attention of one layer over the paged cache: rotates, stores keys and values, attends."""

from dataclasses import dataclass

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_kernels import ops


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm weights [head_dim] applied to every query and key head before rotation."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Shape of one layer's attention. `group` is the KV group whose block tables the layer uses."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    group: int

    def __call__(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[num_tokens, (num_heads + 2 num_kv_heads) * head_dim] -> [num_tokens, num_heads * head_dim].

        Writes the keys and values of the batch to the cache, and rotates `qkv` in place.
        """
        num_tokens = qkv.shape[0]
        heads = qkv.view(num_tokens, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        first_key, first_value = self.num_heads, self.num_heads + self.num_kv_heads
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
        )
        attended = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_tables=group.block_tables,
            num_decodes=batch.num_decodes,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=self.head_dim**-0.5,
            window=self.window,
        )
        return attended.reshape(num_tokens, self.num_heads * self.head_dim)
