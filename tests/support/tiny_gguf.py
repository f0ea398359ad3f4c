"""Tiny random models as GGUF files, with tokenizer and chat template in their metadata."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from tests.support.tiny_models import CHAT_TEMPLATE, EOS_TOKEN_ID, SPECIAL_TOKENS, Weights, tokenizer_json

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path, config: dict[str, Any], weights: Weights, choose_type: Callable[[str], GGMLQuantizationType]
) -> Weights:
    """Writes a file; names that are not of a Hugging Face model (`rope_freqs.weight`) are written as they are.

    `choose_type` gives the type of each matrix by its GGUF name, vectors stay float32.
    Returns the weights as the file holds them, dequantized, under their Hugging Face names.
    """
    family = config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    _add_shape(writer, config)
    _add_tokenizer(writer)
    stored: Weights = {}
    for name, values in weights.items():
        gguf_name = to_gguf_name(name)
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else choose_type(gguf_name)
        permuted = values
        if family == "llama" and re.search(r"[qk]_proj", name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            permuted = _interleave_rows(values, heads)
        data = quants.quantize(permuted, kind)
        writer.add_tensor(gguf_name, data, raw_dtype=kind)
        restored = quants.dequantize(data, kind).reshape(values.shape)
        stored[name] = _restore_rows(restored, heads) if permuted is not values else restored
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def to_gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor."""
    stem, _, kind = name.rpartition(".")
    layer = re.match(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{_NAMES[layer[2]]}.{kind}" if layer else f"{_NAMES.get(stem, stem)}.{kind}"


def _interleave_rows(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of each head from two halves to pairs, as converters for llama.cpp do."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _restore_rows(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]])
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
