"""Makes a model folder that looks at images, for dummy weights: `python -m benchmarks.media_shapes vl7b OUTPUT`.

`vl7b` has the sizes of Qwen2.5-VL-7B-Instruct, `tiny` those of a model that a CPU computes in no time. Everything in
the folder is made here, so no network is needed: the configurations, a chat template, and a tokenizer that has a text
for each of the model's tokens but knows no words: every byte of a prompt becomes a token. Serve it with
`--load-format dummy`.
"""

import argparse
import itertools
import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEXT_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
_VISION_7B = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_TEXT_TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
}
_VISION_TINY = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
}
SHAPES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vl7b": (_TEXT_7B, _VISION_7B),
    "tiny": (_TEXT_TINY, _VISION_TINY),
}
_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
_NUM_SPARE = 421
"""Embeddings in reserve behind the tokens, about as many as the real model has: they have no text."""
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_media_shape(shape: str, output: Path) -> Path:
    """Writes the folder; returns it. Raises OSError, KeyError for a shape that is not in SHAPES."""
    text, ids = SHAPES[shape][0], _special_ids(shape)
    output.mkdir(parents=True, exist_ok=True)
    _write(output / "config.json", model_config(shape))
    _write(output / "preprocessor_config.json", _processor())
    _write(output / "tokenizer.json", _tokenizer(min(ids.values()), ids))
    _write(output / "tokenizer_config.json", _tokenizer_config(text, ids))
    _write(output / "generation_config.json", {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]})
    return output


def _special_ids(shape: str) -> dict[str, int]:
    """The last ones that have a text."""
    first = SHAPES[shape][0]["vocab_size"] - _NUM_SPARE - len(_SPECIAL)
    return {token: first + index for index, token in enumerate(_SPECIAL)}


def model_config(shape: str) -> dict[str, Any]:
    """The model's `config.json`. Raises KeyError for a shape that is not in SHAPES."""
    (text, vision), ids = SHAPES[shape], _special_ids(shape)
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        **text,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "in_chans": 3,
            "in_channels": 3,
            "patch_size": 14,
            "spatial_patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "tokens_per_second": 2,
            **vision,
        },
    }


def _processor() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _tokenizer(num_plain: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """A byte-level BPE without merges: encoding yields bytes, decoding knows every token."""
    words = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))
    vocab = {token: index for index, token in enumerate([*_byte_characters(), *words][:num_plain])}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token_id, "content": text} | plain for text, token_id in ids.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """What a byte-level tokenizer writes for each byte: itself if it is printable in Latin-1, else one of the
    characters from U+0100 on, in order."""
    others = itertools.count(0x100)
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _tokenizer_config(text: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2TokenizerFast",
        "processor_class": "Qwen2_5_VLProcessor",
        "model_max_length": text["max_position_embeddings"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "additional_special_tokens": [token for token in _SPECIAL if token != "<|endoftext|>"],
        "added_tokens_decoder": {str(token_id): {"content": token, "special": True} for token, token_id in ids.items()},
        "chat_template": _TEMPLATE,
    }


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    print(make_media_shape(args.shape, args.output))  # noqa: T201


if __name__ == "__main__":
    main()
