"""The attention block of a dense decoder: grouped queries, optional biases, optional norms of queries and keys."""

from collections.abc import Iterator

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.attention.paged import HeadNorms, PagedAttention
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.placement import Placement, Target, whole


class Attention:
    """Projects to queries, keys and values and attends over the paged cache; `o_proj` projects back.

    Workers have the heads between them. Where there are fewer key-value heads than workers, those that have the
    queries of one head all compute and keep its keys and values.
    """

    __slots__ = ("attend", "norms", "o_proj", "qkv_proj")

    def __init__(self, architecture: ArchitectureConfig, attend: PagedAttention, placement: Placement) -> None:
        head_dim, hidden = architecture.head_dim, whole(architecture.hidden_size)
        queries = placement.share(architecture.num_heads).times(head_dim)
        keys = placement.share(architecture.num_kv_heads).times(head_dim)
        self.attend = attend
        self.qkv_proj = Linear(
            hidden, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, architecture.qkv_bias, placement
        )
        self.o_proj = Linear(queries, {"o_proj": hidden}, architecture.output_bias, placement)
        self.norms = (
            HeadNorms(placement.empty(head_dim), placement.empty(head_dim), architecture.rms_norm_eps)
            if architecture.qk_norm
            else None
        )

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        yield from self.qkv_proj.targets(prefix)
        yield from self.o_proj.targets(prefix)
        if self.norms is not None:
            yield f"{prefix}q_norm.weight", Target.of_whole(self.norms.query)
            yield f"{prefix}k_norm.weight", Target.of_whole(self.norms.key)

    def __call__(
        self,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, heads here * head_dim], what `o_proj` takes.
        Writes the batch's keys and values to the cache."""
        return self.attend(self.qkv_proj(hidden), cos_sin, self.norms, batch, kv_cache)
