"""One layer of a dense decoder."""

from collections.abc import Iterator

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.attention.paged import PagedAttention
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.layers.attention import Attention
from tokenmill_engine.layers.linear import Linear, Placement
from tokenmill_engine.layers.mlp import GatedMLP
from tokenmill_engine.layers.norm import RMSNorm


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, architecture: ArchitectureConfig, attend: PagedAttention, placement: Placement) -> None:
        hidden_size, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.input_norm = RMSNorm(hidden_size, eps, placement)
        self.attention = Attention(architecture, attend, placement)
        self.post_attention_norm = RMSNorm(hidden_size, eps, placement)
        self.mlp = GatedMLP(hidden_size, architecture.intermediate_size, architecture.mlp_bias, placement)

    def targets(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view to fill) of every parameter. Valid until the matrices are finalized."""
        yield from self.input_norm.targets(f"{prefix}input_layernorm")
        yield from self.attention.targets(f"{prefix}self_attn.")
        yield from self.post_attention_norm.targets(f"{prefix}post_attention_layernorm")
        yield from self.mlp.targets(f"{prefix}mlp.")

    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The matrices in the order of use: qkv, attention output, gate and up, down."""
        return (self.attention.qkv_proj, self.attention.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj)

    def __call__(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block output, residual), both [num_tokens, hidden_size]; their sum is the stream that goes on."""
        hidden, residual = self.input_norm(hidden, residual)
        hidden = self.attention(hidden, cos_sin, batch, kv_cache)
        hidden, residual = self.post_attention_norm(hidden, residual)
        return self.mlp(hidden), residual
