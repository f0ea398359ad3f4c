"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share. What differs between them is in `ArchitectureConfig`:
biases, norms of queries and keys, sliding windows, rotary scaling, tied embeddings.

Nothing here waits for the device or looks at values: a forward pass may be captured in a CUDA graph.
"""

from collections.abc import Iterator

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.attention.paged import PagedAttention
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.engine import DtypeName, ModelConfig
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.layers.attention import Attention
from tokenmill_engine.layers.embedding import LMHead, TokenEmbedding
from tokenmill_engine.layers.linear import Linear, Placement
from tokenmill_engine.layers.mlp import GatedMLP
from tokenmill_engine.layers.norm import RMSNorm
from tokenmill_engine.layers.rotary import cos_sin_table

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Key and value cache of each layer, as `ops.allocate_kv_cache` makes them."""

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SPARE_POSITIONS = 64
"""Rows of the rotary table past the longest request: steps that run ahead of a stop may compute a few more tokens."""


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
        """(checkpoint name, view to fill) of every parameter."""
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


class DenseDecoder:
    """Embedding, layers, norm, LM head. Constructed empty; `loader.load_model` fills and finalizes it."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        architecture = config.architecture
        placement = Placement(TORCH_DTYPES[config.dtype], device)
        self.architecture = architecture
        self.kv_specs = tuple(
            KVSpec("full", architecture.num_kv_heads, architecture.head_dim, config.dtype, window)
            for window in architecture.layer_windows
        )
        group_of = {layer: index for index, group in enumerate(group_layers(self.kv_specs)) for layer in group.layers}
        self.embed_tokens = TokenEmbedding(architecture.vocab_size, architecture.hidden_size, placement)
        self.layers = [
            DecoderLayer(architecture, self._attend(spec, group_of[index]), placement)
            for index, spec in enumerate(self.kv_specs)
        ]
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, placement)
        self.lm_head = LMHead(self.embed_tokens, architecture.tie_word_embeddings, placement)
        num_positions = config.max_model_len + _SPARE_POSITIONS
        self.cos_sin = cos_sin_table(architecture.rope, architecture.head_dim, num_positions, device)

    def _attend(self, spec: KVSpec, group: int) -> PagedAttention:
        return PagedAttention(self.architecture.num_heads, spec.num_kv_heads, spec.head_dim, spec.window, group)

    def targets(self) -> dict[str, torch.Tensor]:
        """Where each checkpoint tensor goes, by its Hugging Face name. Every one must be filled, then `finalize`."""
        targets = dict(self.embed_tokens.targets("model.embed_tokens"))
        for index, layer in enumerate(self.layers):
            targets.update(layer.targets(f"model.layers.{index}."))
        targets.update(self.norm.targets("model.norm"))
        targets.update(self.lm_head.targets("lm_head"))
        return targets

    def packables(self) -> list[Linear | LMHead]:
        """What has to be finalized once its weights are loaded, in any order, from any thread."""
        return [*(linear for layer in self.layers for linear in layer.linears()), self.lm_head]

    def forward(self, batch: ForwardBatch, kv_caches: KVCaches) -> torch.Tensor:
        """Normed hidden states [num_tokens, hidden_size]. Writes the batch's keys and values to the caches."""
        hidden = self.embed_tokens(batch.input_ids)
        residual: torch.Tensor | None = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer(hidden, residual, self.cos_sin, batch, kv_cache)
        return self.norm(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [num_rows, hidden_size] -> float32 [num_rows, vocab_size]."""
        return self.lm_head(hidden)

    def argmax_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, int64 [num_rows], without storing logits where the device can do so;
        -1 for rows whose logits are not numbers."""
        return self.lm_head.argmax(hidden)
