"""Tiny random models of every supported family, as folders that can be loaded, served and compared.

Nothing is downloaded and neither torch nor transformers is imported. Weights are float32 and large enough that
greedy choices are clear. The tokenizer is a small byte-level BPE with ChatML tokens; the model's vocabulary is a
little larger than the tokenizer's, as with many real models.
"""

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
Weights = dict[str, NDArray[np.float32]]

VOCAB_SIZE = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, TURN_START, TURN_END]
EOS_TOKEN_ID = SPECIAL_TOKENS.index(TURN_END)

CHAT_TEMPLATE = (
    "{% if tools %}{{ (tools | tojson) + '\\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TRAINING_TEXT = [
    "The capital of France is Paris, and the capital of Japan is Tokyo.",
    "A scheduler hands out tokens; a cache keeps the keys and the values of the tokens that were computed before.",
    "Once upon a time there was a mill that ground words into flour, and the miller was never in a hurry.",
    "def add(first, second):\n    return first + second\n\nfor index in range(10):\n    print(index, add(index, 1))",
    "Zürich, naïve café, 東京, 你好世界, Привет мир, 🙂🚀 — quotes “like these” and numbers 1234567890.",
]


def make_tiny_model(directory: str | Path, family: Family, seed: int = 0, **overrides: Any) -> Path:
    """Writes config, weights, tokenizer and chat template to `directory`; returns it.

    `overrides` replace keys of `config.json`, for example `tie_word_embeddings=True` or `sliding_window=8`.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    _write_json(folder / "config.json", config)
    save_file(dict(tiny_weights(config, seed)), folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


@cache
def _cache_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tokenmill-tiny-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def cached_tiny_model(family: Family, seed: int = 0, **overrides: Any) -> Path:
    """As `make_tiny_model`, in a folder shared by all callers of this process that ask for the same model.
    Nobody may change it."""
    key = json.dumps([family, seed, overrides], sort_keys=True)
    folder = _cache_folder() / f"{family}-{hash(key) & 0xFFFFFFFF:08x}"
    return folder if folder.is_dir() else make_tiny_model(folder, family, seed, **overrides)


def tiny_config(family: Family, **overrides: Any) -> dict[str, Any]:
    """The model's `config.json`: 3 layers of width 64, two query heads to a key/value head."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": EOS_TOKEN_ID,
    }
    if family == "mistral":
        config["sliding_window"] = None
    return config | overrides


def tiny_weights(config: dict[str, Any], seed: int = 0) -> Weights:
    """Random weights under their Hugging Face names, matrices scaled to keep activations near unit size."""
    rng = np.random.default_rng(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    family = config["model_type"]
    biased = {
        "qkv": family == "qwen2" or config.get("attention_bias", False),
        "o": family != "qwen2" and config.get("attention_bias", False),
        "mlp": config.get("mlp_bias", False),
    }
    weights: Weights = {}

    def matrix(name: str, rows: int, columns: int, has_bias: bool = False) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))
        if has_bias:
            weights[f"{name}.bias"] = 0.3 * rng.standard_normal(rows, np.float32)

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = 1 + 0.2 * rng.standard_normal(size, np.float32)

    weights["model.embed_tokens.weight"] = rng.standard_normal((config["vocab_size"], hidden), np.float32)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", hidden)
        matrix(f"{layer}.self_attn.q_proj", queries, hidden, biased["qkv"])
        matrix(f"{layer}.self_attn.k_proj", keys, hidden, biased["qkv"])
        matrix(f"{layer}.self_attn.v_proj", keys, hidden, biased["qkv"])
        matrix(f"{layer}.self_attn.o_proj", hidden, queries, biased["o"])
        if family == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        norm(f"{layer}.post_attention_layernorm", hidden)
        matrix(f"{layer}.mlp.gate_proj", inner, hidden, biased["mlp"])
        matrix(f"{layer}.mlp.up_proj", inner, hidden, biased["mlp"])
        matrix(f"{layer}.mlp.down_proj", hidden, inner, biased["mlp"])
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", config["vocab_size"], hidden)
    return weights


def write_tokenizer(folder: Path) -> None:
    """`tokenizer.json`, its configuration with the chat template, and `generation_config.json`."""
    (folder / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 1024,
        },
    )
    _write_json(folder / "generation_config.json", {"eos_token_id": EOS_TOKEN_ID})


@cache
def add_special_tokens(folder: Path, *tokens: str) -> None:
    """To the tokenizer in `folder`."""
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(path)


def tokenizer_json() -> str:
    """A byte-level BPE trained on a few sentences; its vocabulary is smaller than `VOCAB_SIZE`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 12,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return str(tokenizer.to_str())


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
