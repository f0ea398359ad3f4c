"""FlashAttention-4 (the Python package flash-attn-4) for chunks of prompts in large steps; Triton does the rest."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tokenmill_engine.attention.backend import BuiltInAttention, LayerInputs
from tokenmill_engine.attention.batch import AttentionShape, ForwardBatch, KVGroupBatch
from tokenmill_engine.errors import StartupError
from tokenmill_kernels import ops

_MODULE = "flash_attn.cute"


class FlashAttention4:
    """Chunks of prompts in steps that run without a CUDA graph. Decodes, alone or beside them, and whatever is
    captured for any mix of the two go to Triton."""

    name = "flash-attn-4"

    def __init__(self) -> None:
        """Raises StartupError if the package cannot be imported."""
        try:
            self._varlen: Callable[..., Any] = importlib.import_module(_MODULE).flash_attn_varlen_func
        except Exception as error:
            raise StartupError(
                f"the Python package flash-attn-4 cannot be imported ({type(error).__name__}: {error}); "
                "use --attention-backend triton"
            ) from error
        self._triton = BuiltInAttention("triton")

    def plan(self, batch: ForwardBatch, shape: AttentionShape, dtype: torch.dtype) -> ops.AttentionPlan | None:
        """A plan for what Triton does; None if it does nothing."""
        if self._is_for_triton(batch):
            return self._triton.plan(batch, shape, dtype)
        if batch.num_decodes == 0:
            return None
        return self._triton.plan(_decodes(batch), shape, dtype)

    def attend(self, layer: LayerInputs, batch: ForwardBatch) -> torch.Tensor:
        if self._is_for_triton(batch):
            return self._triton.attend(layer, batch)
        first, window = batch.num_decodes, layer.shape.window
        result = self._varlen(
            layer.q,
            layer.k_cache,
            layer.v_cache,
            cu_seqlens_q=batch.query_start_loc[first:],
            seqused_k=batch.seq_lens[first:],
            page_table=layer.group.block_tables[first:],
            max_seqlen_q=batch.max_query_len,
            max_seqlen_k=batch.max_seq_len,
            softmax_scale=layer.shape.scale,
            causal=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )
        attended: torch.Tensor = result[0] if isinstance(result, tuple) else result
        if first > 0:
            group = KVGroupBatch(layer.group.block_tables[:first], layer.group.slot_mapping[:first])
            decodes = replace(layer, q=layer.q[:first], group=group)
            attended[:first] = self._triton.attend(decodes, _decodes(batch))
        return attended

    def _is_for_triton(self, batch: ForwardBatch) -> bool:
        return batch.num_decodes == batch.num_reqs or batch.any_mix


def _decodes(batch: ForwardBatch) -> ForwardBatch:
    """The requests with one token alone."""
    count = batch.num_decodes
    return replace(
        batch,
        query_start_loc=batch.query_start_loc[: count + 1],
        seq_lens=batch.seq_lens[:count],
        num_reqs=count,
        num_tokens=count,
        max_query_len=1,
    )
