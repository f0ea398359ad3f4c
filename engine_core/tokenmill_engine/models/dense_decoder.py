"""The dense decoder that Llama, Mistral, Qwen2 and Qwen3 share. What differs between them is in `ArchitectureConfig`:
biases, norms of queries and keys, sliding windows, rotary scaling, tied embeddings.

Nothing here waits for the device or looks at values: a forward pass may be captured in a CUDA graph.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch

from tokenmill_engine.attention.backend import AttentionBackend
from tokenmill_engine.attention.batch import AttentionShape, ForwardBatch
from tokenmill_engine.attention.paged import PagedAttention
from tokenmill_engine.attention.selection import built_in
from tokenmill_engine.config.engine import DtypeName, ModelConfig
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.layers.decoder_layer import DecoderLayer
from tokenmill_engine.layers.embedding import LMHead, TokenEmbedding
from tokenmill_engine.layers.norm import RMSNorm
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_engine.layers.rotary import cos_sin_table
from tokenmill_engine.models.fused_stack import FusedStack, can_fuse
from tokenmill_kernels import ops

KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Key and value cache of each layer, as `ops.allocate_kv_cache` makes them."""

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SPARE_POSITIONS = 64
"""Rows of the rotary table past the longest request: steps that run ahead of a stop may compute a few more tokens."""


class DenseDecoder:
    """Embedding, layers, norm, LM head. Constructed empty; `loader.load_model` fills and finalizes it."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        attention: AttentionBackend | None = None,
        group: Group = ALONE,
    ) -> None:
        """`attention` computes the attention of all layers; by default what is built in for the device. `group` are
        the workers that have the model between them: parameters, caches and heads here are this one's part."""
        architecture = config.architecture
        self.architecture = architecture
        self.dtype = TORCH_DTYPES[config.dtype]
        self._attention = attention or built_in(device, self.dtype)
        self.device = device
        self._placement = placement = Placement(self.dtype, device, group)
        self.kv_specs = tuple(
            KVSpec(
                "full", placement.share(architecture.num_kv_heads).count, architecture.head_dim, config.dtype, window
            )
            for window in architecture.layer_windows
        )
        self._groups = group_layers(self.kv_specs)
        group_of = {layer: index for index, group in enumerate(self._groups) for layer in group.layers}
        self.embed_tokens = TokenEmbedding(architecture.vocab_size, architecture.hidden_size, placement)
        self.layers = [
            DecoderLayer(architecture, self._attend(spec, group_of[index]), placement)
            for index, spec in enumerate(self.kv_specs)
        ]
        self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, placement)
        self.head_rows = (
            self.embed_tokens
            if architecture.tie_word_embeddings
            else TokenEmbedding(architecture.vocab_size, architecture.hidden_size, placement)
        )
        self.lm_head = LMHead(self.head_rows)
        num_positions = config.max_model_len + _SPARE_POSITIONS
        self.cos_sin = cos_sin_table(architecture.rope, architecture.head_dim, num_positions, device)
        self._fused: FusedStack | None = None

    def _attend(self, spec: KVSpec, group: int) -> PagedAttention:
        num_heads = self._placement.share(self.architecture.num_heads).count
        shape = AttentionShape(num_heads, spec.num_kv_heads, spec.head_dim, spec.window)
        return PagedAttention(shape, group, self._attention)

    @property
    def is_fused(self) -> bool:
        """Whether the layers run as one native call."""
        return self._fused is not None

    def targets(self) -> dict[str, Target]:
        """Where each checkpoint tensor goes, or this worker's part of it, by its Hugging Face name. Every one must be
        filled, then `finalize`."""
        targets = dict(self.embed_tokens.targets("model.embed_tokens"))
        for index, layer in enumerate(self.layers):
            targets.update(layer.targets(f"model.layers.{index}."))
        targets.update(self.norm.targets("model.norm"))
        if self.head_rows is not self.embed_tokens:
            targets.update(self.head_rows.targets("lm_head"))
        return targets

    def finalize(self, allow_fused: bool = True) -> None:
        """Brings the loaded weights into the form that the device's kernels like best; the plain ones are freed.

        On a CPU whose library can run the whole stack, it takes the layers over unless `allow_fused` is False;
        results are the same within rounding. A worker that has a part of the layers runs them one by one.
        """
        self.embed_tokens.finalize()
        self.head_rows.finalize()
        embedding = self.embed_tokens.weight
        is_alone = self._placement.group.size == 1
        fuse = allow_fused and is_alone and can_fuse(self.architecture, self.dtype, self.device, len(self._groups))
        if fuse and isinstance(embedding, ops.PackedWeight):
            self._fused = FusedStack(self.architecture, self.layers, embedding, self.norm.weight, self.cos_sin)
            return
        for layer in self.layers:
            for linear in layer.linears():
                linear.finalize()

    def linear_shapes(self) -> list[tuple[ops.LinearUse, int, int]]:
        """(use, rows, columns) of every kind of weight matrix, as loaded; for `ops.prepare_linears`."""
        qkv, output, gate_up, down = self.layers[0].linears()
        head = self.head_rows.weight
        uses: list[tuple[ops.LinearUse, torch.Tensor | ops.PackedWeight]] = [
            ("linear", qkv.weight), ("linear", output.weight), ("gated", gate_up.weight), ("linear", down.weight),
            ("linear", head), ("argmax", head),
        ]  # fmt: skip
        return [(use, *weight.shape) for use, weight in uses]

    def distinct_layers(self) -> list[int]:
        """Layers which between them launch every kernel that the whole model does."""
        first_of_each = {spec: layer for layer, spec in reversed(list(enumerate(self.kv_specs)))}
        return sorted({0, *first_of_each.values(), len(self.layers) - 1})

    def excerpt(self, layers: Sequence[int]) -> Self:
        """A model of some of the layers, ascending, with the same weights."""
        excerpt = copy.copy(self)
        excerpt.layers = [self.layers[layer] for layer in layers]
        return excerpt

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: KVCaches,
        output_rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normed hidden states [num_tokens, hidden_size], or those of `output_rows` alone; in `out`, if that is given.

        `output_rows` is int32 and ascending; on CUDA negative rows may follow as padding, which give no usable states.
        Writes the batch's keys and values to the caches, which must be the same in every call.
        """
        if self._fused is not None:
            return self._fused.forward(batch, kv_caches, output_rows, out)
        self._plan_attention(batch)
        normed, residual = self.layers[0].input_norm.embed(batch.input_ids, self.embed_tokens)
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=True):
            is_last = next_norm is self.norm
            rows = output_rows if is_last else None
            hidden, residual = layer(normed, residual, self.cos_sin, batch, kv_cache, rows)
            normed, residual = next_norm(hidden, residual, out if is_last else None)
        return normed

    def _plan_attention(self, batch: ForwardBatch) -> None:
        """One plan for all layers of a shape."""
        shapes = dict.fromkeys(layer.attention.attend.shape for layer in self.layers)
        batch.plans = {shape: self._attention.plan(batch, shape, self.dtype) for shape in shapes}

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result [num_rows, hidden_size] -> float32 [num_rows, vocab_size]."""
        return self.lm_head(hidden)

    def argmax_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """The most likely token of each row, int32 [num_rows], without storing logits where the device can do so;
        -1 for rows whose logits are not numbers."""
        return self.lm_head.argmax(hidden)
