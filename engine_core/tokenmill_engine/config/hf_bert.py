"""The `config.json` of a text encoder of the BERT family. Torch-free."""

from collections.abc import Mapping
from typing import Any

from tokenmill_engine.config.architecture import Activation, ArchitectureConfig, RopeConfig, TextEncoderConfig
from tokenmill_engine.config.json_values import positive
from tokenmill_engine.errors import ConfigError

_CLASSIFIER = "BertForSequenceClassification"
TEXT_ENCODERS = ("BertModel", _CLASSIFIER)

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16"}


def parse_text_encoder(config: Mapping[str, Any], source: str) -> ArchitectureConfig | None:
    """The encoder that a `config.json` describes, or None if it is of another kind; `source` names it in errors.

    Raises ConfigError for a variant that is not supported.
    """
    names = config.get("architectures") or []
    name = next((name for name in names if name in TEXT_ENCODERS), None)
    if name is None:
        return None
    for key, supported in (
        ("position_embedding_type", "absolute"),
        ("is_decoder", False),
        ("quantization_config", None),
    ):
        if config.get(key, supported) != supported:
            raise ConfigError(f"{source}: {key} {config[key]!r} is not supported for {name}")
    num_labels = len(config.get("id2label") or {}) or config.get("num_labels", 2)
    if name == _CLASSIFIER and num_labels != 1:
        raise ConfigError(
            f"{source}: {name} is supported with one label, which scores pairs of texts, not {num_labels}"
        )
    activation = config.get("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"{source}: hidden_act {activation!r} is not supported, only {', '.join(_ACTIVATIONS)}")
    num_heads, hidden_size = positive(config, "num_attention_heads", source), positive(config, "hidden_size", source)
    if hidden_size % num_heads:
        raise ConfigError(f"{source}: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    num_types = positive(config, "type_vocab_size", source)
    if name == _CLASSIFIER and num_types < 2:
        raise ConfigError(f"{source}: type_vocab_size must be 2 or more for pairs of texts, not {num_types}")
    num_positions = positive(config, "max_position_embeddings", source)
    num_layers = positive(config, "num_hidden_layers", source)
    stated = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return ArchitectureConfig(
        name=name,
        vocab_size=positive(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        rms_norm_eps=float(config.get("layer_norm_eps", 1e-12)),
        max_position_embeddings=num_positions,
        rope=RopeConfig(),
        layer_windows=(None,) * num_layers,
        tie_word_embeddings=True,
        has_output_embeddings=False,
        checkpoint_dtype=_DTYPES.get(stated, "float32"),  # type: ignore[arg-type]
        text_encoder=TextEncoderConfig(
            num_positions=num_positions,
            num_types=num_types,
            activation=_ACTIVATIONS[activation],
            scores_pairs=name == _CLASSIFIER,
        ),
    )
