"""Models that look at images, as their `config.json` describes them: for dummy weights."""

from collections.abc import Mapping
from typing import Any

_DECODER: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "temporal_patch_size": 2,
}
_TINY_DECODER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
}
_TINY_VISION = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 8,
    "out_hidden_size": 128,
    "fullatt_block_indexes": [1, 3],
}

QWEN2_5_VL_7B: Mapping[str, Any] = {**_DECODER, "vision_config": _VISION}
TINY_QWEN2_5_VL: Mapping[str, Any] = {**_DECODER, **_TINY_DECODER, "vision_config": {**_VISION, **_TINY_VISION}}
"""What a CPU computes in no time, with heads for four workers."""
