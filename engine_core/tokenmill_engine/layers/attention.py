"""The attention block of a dense decoder: grouped queries, optional biases, optional norms of queries and keys."""

from collections.abc import Iterator

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.attention.paged import HeadNorms, PagedAttention
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.layers.linear import Linear, Placement


class Attention:
    """Projects to queries, keys and values and attends over the paged cache; `o_proj` projects back."""

    __slots__ = ("attend", "norms", "o_proj", "qkv_proj")

    def __init__(self, architecture: ArchitectureConfig, attend: PagedAttention, placement: Placement) -> None:
        head_dim = architecture.head_dim
        query_size, kv_size = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
        self.attend = attend
        self.qkv_proj = Linear(
            architecture.hidden_size,
            {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size},
            architecture.qkv_bias,
            placement,
        )
        self.o_proj = Linear(query_size, {"o_proj": architecture.hidden_size}, architecture.output_bias, placement)
        self.norms = (
            HeadNorms(placement.empty(head_dim), placement.empty(head_dim), architecture.rms_norm_eps)
            if architecture.qk_norm
            else None
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view to fill) of every parameter."""
        yield from self.qkv_proj.targets(prefix)
        yield from self.o_proj.targets(prefix)
        if self.norms is not None:
            yield f"{prefix}q_norm.weight", self.norms.query
            yield f"{prefix}k_norm.weight", self.norms.key

    def __call__(
        self,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, num_heads * head_dim], what `o_proj` takes.
        Writes the batch's keys and values to the cache."""
        return self.attend(self.qkv_proj(hidden), cos_sin, self.norms, batch, kv_cache)
