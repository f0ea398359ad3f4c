"""A whole dense decoder stack in one call of the C++ library: no Python between layers.

Covers Llama, Mistral, Qwen2 (biases) and Qwen3 (query and key norms). The residual stream is kept in float32, so
bfloat16 results differ from the op-by-op path by rounding. Knows nothing of requests, sampling or checkpoints.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tokenmill_kernels.cpu.library import (
    DTYPE_CODES,
    AttentionShapeStruct,
    DecoderLayerStruct,
    DecoderShapeStruct,
    StepStruct,
    check,
    load,
)
from tokenmill_kernels.cpu.ops import attention_fits, batch_struct, cache_struct
from tokenmill_kernels.cpu.packed import PackedWeight, allocate, can_pack, pack_into, packed_size


@dataclass(slots=True, frozen=True)
class DecoderShape:
    """Sizes of the stack. `scale` multiplies attention scores before the softmax."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    scale: float
    soft_cap: float | None = None

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attended_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(slots=True)
class DecoderLayerWeights:
    """Plain weights of one layer, matrices [out_features, in_features]; they may be freed once they are packed."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    """[(H + 2 KH) * D, hidden]: queries, keys, values."""
    output: torch.Tensor
    post_attention_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    """[head_dim]"""
    k_norm: torch.Tensor | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What is added to some tokens behind each of the first layers."""

    tokens: torch.Tensor
    """int64 [num_rows], no two alike."""
    rows: torch.Tensor
    """[num_rows, num_layers * hidden_size] of the decoder's type: for every layer its values. Rows may lie apart."""


class DenseDecoder:
    """Token ids in, final-normed hidden states out. Calls of `forward` must not overlap."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Iterable[DecoderLayerWeights],
        embedding: PackedWeight,
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        """Packs `layers` one at a time as they are drawn, so a generator keeps the peak of memory low.

        `embedding` is [V, hidden] and may serve as the LM head too; `cos_sin` is float32 [max_position, rotary_dim].
        `supports(shape, embedding.dtype)` must hold.
        """
        self.shape = shape
        self.dtype = embedding.dtype
        self._kept: list[torch.Tensor] = []
        self._memory = allocate(shape.num_layers * sum(self._matrix_sizes()), self.dtype)
        self._layers = (DecoderLayerStruct * shape.num_layers)()
        count = 0
        for index, layer in enumerate(layers):
            self._pack_layer(index, layer)
            count = index + 1
        if count != shape.num_layers:
            raise ValueError(f"the decoder has {shape.num_layers} layers, not {count}")
        self._struct = DecoderShapeStruct(
            dtype=DTYPE_CODES[self.dtype],
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_layers=shape.num_layers,
            vocab_size=embedding.out_features,
            rotary_dim=cos_sin.shape[1],
            eps=shape.rms_norm_eps,
            scale=shape.scale,
            soft_cap=shape.soft_cap or 0.0,
            cos_sin=self._keep(cos_sin, torch.float32),
            embedding=self._keep(embedding.data, self.dtype),
            final_norm=self._keep(final_norm, self.dtype),
        )
        self._handle: int | None = None

    @staticmethod
    def supports(shape: DecoderShape, dtype: torch.dtype) -> bool:
        """Whether the library is there and takes these sizes."""
        inputs = (shape.hidden_size, shape.intermediate_size, shape.attended_size)
        return attention_fits(shape.num_heads, shape.num_kv_heads, shape.head_dim) and all(
            can_pack(dtype, size) for size in inputs
        )

    def bind_kv_caches(self, caches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Keys and values of every layer (see `ops.allocate_kv_cache`); before the first `forward`, and only once.

        Raises:
            ValueError: not one pair per layer, or not of the decoder's shape and type.
        """
        shape = self.shape
        if len(caches) != shape.num_layers or self._handle is not None:
            raise ValueError(f"expected one pair of caches for each of {shape.num_layers} layers, once")
        for index, pair in enumerate(caches):
            for cache in pair:
                if cache.shape[2:] != (shape.num_kv_heads, shape.head_dim) or cache.dtype != self.dtype:
                    raise ValueError(f"cache {list(cache.shape)} of {cache.dtype} does not fit the decoder")
            self._layers[index].keys, self._layers[index].values = cache_struct(pair[0]), cache_struct(pair[1])
            self._kept += pair
        self._struct.attention = AttentionShapeStruct(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=caches[0][0].shape[1],
        )
        library = load()
        assert library is not None
        self._handle = library.tokenmill_decoder_create(self._struct, self._layers)
        if self._handle is None:
            raise MemoryError("the CPU kernels could not allocate the decoder")
        weakref.finalize(self, library.tokenmill_decoder_destroy, self._handle)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_tables: torch.Tensor,
        output_rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        embeddings: torch.Tensor | None = None,
        cos_sin: torch.Tensor | None = None,
        added: AddedRows | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm: [T, hidden], or [len(output_rows), hidden] for those rows alone.

        `input_ids` and `positions` int32 [T], `slot_mapping` int64 [T], the requests as in `ops.paged_attention`.
        `output_rows` int32, ascending: the last layer then does no more work than these rows need.
        Writes the keys and values of the step to the bound caches, and the result to `out` if that is given.
        `embeddings` [T, hidden] take the place of the rows of `input_ids`; `cos_sin`, float32 [any, rotary_dim], takes
        that of the table whose rows `positions` name. `added` is for fewer layers than there are.
        """
        if self._handle is None:
            raise RuntimeError("bind_kv_caches must come before forward")
        outputs = input_ids if output_rows is None else output_rows
        for tensor in (input_ids, positions, outputs, query_start_loc, seq_lens, block_tables):
            if tensor.dtype != torch.int32 or tensor.stride(-1) != 1:
                raise TypeError(f"expected contiguous int32 tensors, got {tensor.dtype} with {tensor.stride()}")
        if slot_mapping.dtype != torch.int64 or slot_mapping.stride(-1) != 1:
            raise TypeError(f"expected a contiguous int64 slot_mapping, got {slot_mapping.dtype}")
        self._check_rows(embeddings, len(input_ids), self.shape.hidden_size, self.dtype)
        self._check_rows(cos_sin, 0, self._struct.rotary_dim, torch.float32)
        shape = (outputs.shape[0], self.shape.hidden_size)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        elif out.shape != shape or out.dtype != self.dtype or not out.is_contiguous():
            raise ValueError(f"expected an output {list(shape)} of {self.dtype}, got {list(out.shape)} of {out.dtype}")
        num_added_layers = self._num_added_layers(added)
        step = StepStruct(
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            slot_mapping=slot_mapping.data_ptr(),
            output_rows=None if output_rows is None else output_rows.data_ptr(),
            out=out.data_ptr(),
            embeddings=None if embeddings is None else embeddings.data_ptr(),
            cos_sin=None if cos_sin is None else cos_sin.data_ptr(),
            added=None if added is None else added.rows.data_ptr(),
            added_tokens=None if added is None else added.tokens.data_ptr(),
            added_stride=0 if added is None else added.rows.stride(0),
            num_added=0 if added is None else len(added.tokens),
            num_added_layers=num_added_layers,
            num_tokens=input_ids.shape[0],
            num_outputs=outputs.shape[0],
            attention=batch_struct(query_start_loc, seq_lens, block_tables),
        )
        library = load()
        assert library is not None
        check(library.tokenmill_decoder_forward(self._handle, step))
        return out

    def _num_added_layers(self, added: AddedRows | None) -> int:
        if added is None:
            return 0
        tokens, rows, hidden_size = added.tokens, added.rows, self.shape.hidden_size
        if tokens.dtype != torch.int64 or not tokens.is_contiguous() or len(tokens) != len(rows):
            raise TypeError(f"expected an int64 token for each of {len(rows)} added rows")
        if rows.dtype != self.dtype or rows.stride(1) != 1 or rows.shape[1] % hidden_size:
            raise TypeError(f"expected added rows of {self.dtype} for layers of {hidden_size}, got {list(rows.shape)}")
        num_layers = rows.shape[1] // hidden_size
        if num_layers >= self.shape.num_layers:
            raise ValueError(f"rows are added behind fewer than {self.shape.num_layers} layers, not {num_layers}")
        return num_layers

    def _check_rows(self, rows: torch.Tensor | None, least: int, width: int, dtype: torch.dtype) -> None:
        if rows is None or (
            rows.dtype == dtype and len(rows) >= least and rows.shape[1] == width and rows.is_contiguous()
        ):
            return
        raise TypeError(f"expected contiguous rows of {width} {dtype}, got {list(rows.shape)} of {rows.dtype}")

    def _matrix_sizes(self) -> tuple[int, int, int, int]:
        """Elements of the packed qkv, output, gate_up and down matrices of a layer."""
        shape = self.shape
        return (
            packed_size(shape.qkv_size, shape.hidden_size),
            packed_size(shape.hidden_size, shape.attended_size),
            2 * packed_size(shape.intermediate_size, shape.hidden_size),
            packed_size(shape.hidden_size, shape.intermediate_size),
        )

    def _pack_layer(self, index: int, layer: DecoderLayerWeights) -> None:
        sizes = self._matrix_sizes()
        start = index * sum(sizes)
        qkv, output, gate_up, down = torch.split(self._memory[start : start + sum(sizes)], list(sizes))
        pack_into(qkv, self._check(layer.qkv, self.shape.qkv_size, self.shape.hidden_size))
        pack_into(output, self._check(layer.output, self.shape.hidden_size, self.shape.attended_size))
        # Gate and up features meet in one tile of the product, which can then apply the activation at once.
        pack_into(gate_up, self._check(layer.gate, self.shape.intermediate_size, self.shape.hidden_size), 0, 2)
        pack_into(gate_up, self._check(layer.up, self.shape.intermediate_size, self.shape.hidden_size), 1, 2)
        pack_into(down, self._check(layer.down, self.shape.hidden_size, self.shape.intermediate_size))
        struct = self._layers[index]
        struct.qkv, struct.output = qkv.data_ptr(), output.data_ptr()
        struct.gate_up, struct.down = gate_up.data_ptr(), down.data_ptr()
        struct.window = layer.window or 0
        for name in ("input_norm", "post_attention_norm", "q_norm", "k_norm"):
            setattr(struct, name, self._keep(getattr(layer, name), self.dtype))
        for name in ("qkv_bias", "output_bias", "gate_bias", "up_bias", "down_bias"):
            setattr(struct, name, self._keep(getattr(layer, name), self.dtype))

    def _check(self, weight: torch.Tensor, out_features: int, in_features: int) -> torch.Tensor:
        if weight.shape != (out_features, in_features):
            raise ValueError(f"expected a matrix {[out_features, in_features]}, got {list(weight.shape)}")
        return weight.to(self.dtype)

    def _keep(self, tensor: torch.Tensor | None, dtype: torch.dtype) -> int | None:
        """Address of the tensor's values in `dtype`, which live as long as the decoder; None for None."""
        if tensor is None:
            return None
        self._kept.append(tensor.detach().to(dtype).contiguous())
        return self._kept[-1].data_ptr()
