"""All layers of a dense decoder as one native call per step, where the CPU library can run them."""

from collections.abc import Iterator, Sequence

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.layers.decoder_layer import DecoderLayer
from tokenmill_kernels import ops
from tokenmill_kernels.cpu.decoder import AddedRows, DecoderLayerWeights, DecoderShape, DenseDecoder

KVCaches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class FusedStack:
    """Embedding, layers and final norm. The layers it is made of are used up: their weights live on in packed form."""

    def __init__(
        self,
        architecture: ArchitectureConfig,
        layers: list[DecoderLayer],
        embedding: ops.PackedWeight,
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> None:
        """Empties `layers` as it packs them, so that memory holds one layer twice and not all of them.
        `can_fuse` must hold."""
        self._decoder = DenseDecoder(_shape(architecture), _drained(layers), embedding, final_norm, cos_sin)
        self._bound: KVCaches | None = None

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: KVCaches,
        output_rows: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Normed hidden states of all tokens or of `output_rows`, in `out` if that is given. The caches must be the
        same in every call.

        Raises:
            ValueError: they are not.
        """
        if self._bound is not kv_caches:
            self._decoder.bind_kv_caches(kv_caches)
            self._bound = kv_caches
        group = batch.groups[0]
        added = None
        if batch.deepstack is not None and batch.media is not None:
            added = AddedRows(batch.media.tokens, batch.deepstack)
        return self._decoder.forward(
            batch.input_ids,
            batch.positions,
            group.slot_mapping,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_tables=group.block_tables,
            output_rows=output_rows,
            out=out,
            embeddings=batch.embeddings,
            cos_sin=batch.cos_sin,
            added=added,
        )


def can_fuse(architecture: ArchitectureConfig, dtype: torch.dtype, device: torch.device, num_groups: int) -> bool:
    """Whether the CPU library is there and runs this architecture; it knows one block table per request."""
    return device.type == "cpu" and num_groups == 1 and DenseDecoder.supports(_shape(architecture), dtype)


def _shape(architecture: ArchitectureConfig) -> DecoderShape:
    return DecoderShape(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        intermediate_size=architecture.intermediate_size,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        rms_norm_eps=architecture.rms_norm_eps,
        scale=architecture.head_dim**-0.5,
    )


def _drained(layers: list[DecoderLayer]) -> Iterator[DecoderLayerWeights]:
    layers.reverse()
    while layers:
        yield _weights(layers.pop())


def _weights(layer: DecoderLayer) -> DecoderLayerWeights:
    """The layer's weights by the names of the library, gate and up apart."""
    attention, mlp = layer.attention, layer.mlp
    gate, up = mlp.gate_up_proj.plain_weight.chunk(2)
    biases = mlp.gate_up_proj.bias
    gate_bias, up_bias = biases.chunk(2) if biases is not None else (None, None)
    return DecoderLayerWeights(
        input_norm=layer.input_norm.weight,
        qkv=attention.qkv_proj.plain_weight,
        output=attention.o_proj.plain_weight,
        post_attention_norm=layer.post_attention_norm.weight,
        gate=gate,
        up=up,
        down=mlp.down_proj.plain_weight,
        qkv_bias=attention.qkv_proj.bias,
        output_bias=attention.o_proj.bias,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=mlp.down_proj.bias,
        q_norm=attention.norms.query if attention.norms is not None else None,
        k_norm=attention.norms.key if attention.norms is not None else None,
        window=attention.attend.shape.window,
    )
