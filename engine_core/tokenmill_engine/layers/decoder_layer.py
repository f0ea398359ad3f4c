"""One layer of a dense decoder."""

from collections.abc import Iterator

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.attention.paged import PagedAttention
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.layers.attention import Attention
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.mlp import GatedMLP
from tokenmill_engine.layers.norm import RMSNorm
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_kernels import ops


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    __slots__ = ("attention", "input_norm", "mlp", "post_attention_norm")

    def __init__(self, architecture: ArchitectureConfig, attend: PagedAttention, placement: Placement) -> None:
        hidden_size, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.input_norm = RMSNorm(hidden_size, eps, placement)
        self.attention = Attention(architecture, attend, placement)
        self.post_attention_norm = RMSNorm(hidden_size, eps, placement)
        self.mlp = GatedMLP(hidden_size, architecture.intermediate_size, architecture.mlp_bias, placement)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter. Valid until the matrices are finalized."""
        yield from self.input_norm.targets(f"{prefix}input_layernorm")
        yield from self.attention.targets(f"{prefix}self_attn.")
        yield from self.post_attention_norm.targets(f"{prefix}post_attention_layernorm")
        yield from self.mlp.targets(f"{prefix}mlp.")

    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """The matrices in the order of use: qkv, attention output, gate and up, down."""
        return (self.attention.qkv_proj, self.attention.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj)

    def __call__(
        self,
        normed: torch.Tensor,
        residual: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: ForwardBatch,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        output_rows: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block output, residual), both [num_tokens, hidden_size]; their sum is the stream that goes on. Of several
        workers each has a part of the block output.

        `residual` is the stream that came in, `normed` the same behind `input_norm`. All tokens leave keys and values;
        given `output_rows` (int32), only those tokens go through the rest of the layer and come out.
        """
        attended = self.attention(normed, cos_sin, batch, kv_cache)
        if output_rows is not None:
            attended, residual = ops.gather_rows(attended, residual, output_rows)
        normed, residual = self.post_attention_norm(self.attention.o_proj(attended), residual)
        return self.mlp(normed), residual
