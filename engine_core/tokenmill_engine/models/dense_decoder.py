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
from tokenmill_engine.config.stages import Stage, whole_model
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.layers.decoder_layer import DecoderLayer
from tokenmill_engine.layers.embedding import LMHead, TokenEmbedding
from tokenmill_engine.layers.norm import RMSNorm
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_engine.layers.rotary import cos_sin_table
from tokenmill_engine.models.fused_stack import FusedStack, can_fuse
from tokenmill_kernels import ops

Stream = tuple[torch.Tensor, torch.Tensor]
"""What goes from layer to layer: the last one's output and the residual, both [num_tokens, hidden_size]. Of several
workers each has a part of the output, which is a sum, and all of the residual."""
KVCaches = list[tuple[torch.Tensor, torch.Tensor]]
"""Key and value cache of each layer, as `ops.allocate_kv_cache` makes them."""

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_SPARE_POSITIONS = 64
"""Rows of the rotary table past the longest request: steps that run ahead of a stop may compute a few more tokens."""


def add_deepstack(hidden: torch.Tensor, deepstack: torch.Tensor, tokens: torch.Tensor, layer: int) -> None:
    """Add to `hidden` [num_tokens, hidden_size], in place, what `ForwardBatch.deepstack` has for this layer."""
    first, width = layer * hidden.shape[1], hidden.shape[1]
    if first < deepstack.shape[1]:
        hidden.index_add_(0, tokens, deepstack[:, first : first + width])


class DenseDecoder:
    """Embedding, layers, norm, LM head. Constructed empty; `loader.load_model` fills and finalizes it.

    One stage of a pipeline has some of the layers; `embed_tokens` is there on the first, `norm` and `lm_head` on the
    last.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        attention: AttentionBackend | None = None,
        group: Group = ALONE,
        stage: Stage | None = None,
    ) -> None:
        """`attention` computes the attention of all layers; by default what is built in for the device. `group` are
        the workers that have the model, or `stage` of it, between them: parameters, caches and heads here are this
        one's part."""
        architecture = config.architecture
        self.architecture = architecture
        self.stage = stage = stage or whole_model(architecture.num_layers)
        self.dtype = TORCH_DTYPES[config.dtype]
        self.makes_vectors = config.pooling is not None
        """Normed hidden states are what is wanted of it, not tokens."""
        self._attention = attention or built_in(device, self.dtype)
        self.device = device
        self._placement = placement = Placement(self.dtype, device, group)
        self.kv_specs = tuple(
            KVSpec(
                "full", placement.share(architecture.num_kv_heads).count, architecture.head_dim, config.dtype, window
            )
            for window in architecture.layer_windows[stage.layers.start : stage.layers.stop]
        )
        self._groups = group_layers(self.kv_specs)
        group_of = {layer: index for index, group in enumerate(self._groups) for layer in group.layers}
        is_tied = architecture.tie_word_embeddings
        self._vocabulary: dict[str, TokenEmbedding] = {}
        """What is here for each entry of the vocabulary, by name."""
        if stage.is_first or (stage.is_last and is_tied):
            self.embed_tokens = self._add_vocabulary("model.embed_tokens")
        self.layers = [
            DecoderLayer(architecture, self._attend(spec, group_of[index]), placement)
            for index, spec in enumerate(self.kv_specs)
        ]
        if stage.is_last:
            self.norm = RMSNorm(architecture.hidden_size, architecture.rms_norm_eps, placement)
            self.head_rows = self.embed_tokens if is_tied else self._add_vocabulary("lm_head")
            self.lm_head = LMHead(self.head_rows)
        num_positions = config.num_positions + _SPARE_POSITIONS
        self.cos_sin = cos_sin_table(architecture.rope, architecture.head_dim, num_positions, device)
        self._fused: FusedStack | None = None

    def _add_vocabulary(self, name: str) -> TokenEmbedding:
        table = TokenEmbedding(self.architecture.vocab_size, self.architecture.hidden_size, self._placement)
        self._vocabulary[name] = table
        return table

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
        targets: dict[str, Target] = {}
        for name, table in self._vocabulary.items():
            targets.update(table.targets(name))
        for index, layer in zip(self.stage.layers, self.layers, strict=True):
            targets.update(layer.targets(f"model.layers.{index}."))
        if self.stage.is_last:
            targets.update(self.norm.targets("model.norm"))
        return targets

    def parameter_names(self) -> list[str]:
        """The Hugging Face names of all parameters of the whole model, in order; `targets` has those of this stage."""
        layer = [name for name, _ in self.layers[0].targets("")]
        names = ["model.embed_tokens.weight"]
        names += [f"model.layers.{index}.{name}" for index in range(self.stage.num_layers) for name in layer]
        names.append("model.norm.weight")
        return names if self.architecture.tie_word_embeddings else [*names, "lm_head.weight"]

    def own_name(self, name: str) -> str | None:
        """What `targets` calls a tensor of a Hugging Face checkpoint; None for one that the model does not use."""
        is_bare = name.startswith(("embed_tokens.", "layers.", "norm."))
        return f"model.{name}" if is_bare else name  # it was saved without a head

    def finalize(self, allow_fused: bool = True) -> None:
        """Brings the loaded weights into the form that the device's kernels like best; the plain ones are freed.

        On a CPU whose library can run the whole stack, it takes the layers over unless `allow_fused` is False;
        results are the same within rounding. A worker that has a part of the layers runs them one by one.
        """
        for table in self._vocabulary.values():
            table.finalize()
        is_whole = self._placement.group.size == 1 and self.stage.is_whole
        if allow_fused and is_whole and can_fuse(self.architecture, self.dtype, self.device, len(self._groups)):
            embedding = self.embed_tokens.weight
            if isinstance(embedding, ops.PackedWeight):
                self._fused = FusedStack(self.architecture, self.layers, embedding, self.norm.weight, self.cos_sin)
                return
        for layer in self.layers:
            for linear in layer.linears():
                linear.finalize()

    def linear_shapes(self) -> list[tuple[ops.LinearUse, int, int]]:
        """(use, rows, columns) of every kind of weight matrix, as loaded; for `ops.prepare_linears`."""
        qkv, output, gate_up, down = self.layers[0].linears()
        uses: list[tuple[ops.LinearUse, torch.Tensor | ops.PackedWeight]] = [
            ("linear", qkv.weight), ("linear", output.weight), ("gated", gate_up.weight), ("linear", down.weight)
        ]  # fmt: skip
        if self.stage.is_last:
            uses += [("linear", self.head_rows.weight), ("argmax", self.head_rows.weight)]
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
        incoming: Stream | None = None,
    ) -> torch.Tensor:
        """Normed hidden states [num_tokens, hidden_size], or those of `output_rows` alone; in `out`, if that is given.
        Of a model in stages, the last one gives them, from what is `incoming`.

        `output_rows` is int32 and ascending; on CUDA negative rows may follow as padding, which give no usable states.
        Writes the batch's keys and values to the caches, which must be the same in every call.
        """
        if self._fused is not None:
            return self._fused.forward(batch, kv_caches, output_rows, out)
        hidden, residual = self.run_layers(batch, kv_caches, incoming, output_rows)
        return self.norm(hidden, residual, out)[0]

    def run_layers(
        self,
        batch: ForwardBatch,
        kv_caches: KVCaches,
        incoming: Stream | None,
        output_rows: torch.Tensor | None = None,
    ) -> Stream:
        """Through the layers of this stage: from `incoming`, what the stage before gave, or from the batch's token ids
        if this is the first. `output_rows` as in `forward`, for the last stage alone. May overwrite `incoming`."""
        self._plan_attention(batch)
        first_norm = self.layers[0].input_norm
        if incoming is not None:
            normed, residual = first_norm(*incoming)
        elif batch.embeddings is not None:
            normed, residual = first_norm.begin(batch.embeddings)
        else:
            normed, residual = first_norm.embed(batch.input_ids, self.embed_tokens)
        cos_sin = self.cos_sin if batch.cos_sin is None else batch.cos_sin
        last = len(self.layers) - 1
        for index, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            rows = output_rows if index == last else None
            hidden, residual = layer(normed, residual, cos_sin, batch, kv_cache, rows)
            if batch.deepstack is not None and batch.media is not None:
                add_deepstack(hidden, batch.deepstack, batch.media.tokens, index)
            if index < last:
                normed, residual = self.layers[index + 1].input_norm(hidden, residual)
        return hidden, residual

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
