"""What a dense decoder looks like, independent of the file format it came from. Torch-free."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is `default`, `linear`, `llama3` (Llama 3.1 technical report, frequency bands) or
    `yarn` (arXiv:2309.00071); fields that a kind does not use keep their defaults."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """YaRN: round the borders of the ramp to whole dimensions."""
    freq_factors: tuple[float, ...] = ()
    """Divisors of the [rotary_dim / 2] frequencies, as GGUF files of Llama 3 carry them; empty for none."""
    rotary_dim: int | None = None
    """Number of leading head dimensions that rotate; None for all."""


Activation = Literal["gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class TextEncoderConfig:
    """What BERT (arXiv:1810.04805) has and decoders have not. Every token sees all others, positions are learnt, norms
    are layer norms with biases and follow what they belong to."""

    num_positions: int
    num_types: int
    """Kinds of tokens: those of a first text and those of a second."""
    activation: Activation
    scores_pairs: bool = False
    """There is a head that makes one number of a pair of texts."""


@dataclass(frozen=True, slots=True)
class ArchitectureConfig:
    """Shape of a dense decoder-only transformer (Llama, Mistral, Qwen2, Qwen3 families), or of a text encoder.

    `layer_windows[i]` is the sliding window of layer i in tokens (itself and window - 1 before it), or None.
    """

    name: str
    """Hugging Face class name, for example `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    checkpoint_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    has_output_embeddings: bool = True
    """False: its files have none, so it makes vectors and generates no text."""
    text_encoder: TextEncoderConfig | None = None
    """Of a model that reads a text as a whole and generates none. `rms_norm_eps` is that of its layer norms then, and
    what is about rotation, windows and output embeddings has no meaning."""

    @property
    def num_parameters(self) -> int:
        """Weights of the model, with tied embeddings counted once."""
        if self.text_encoder is not None:
            layer = 4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size + 9 * self.hidden_size
            rows = self.vocab_size + self.text_encoder.num_positions + self.text_encoder.num_types + 2
            head = self.hidden_size * (self.hidden_size + 2) + 1 if self.text_encoder.scores_pairs else 0
            return self.num_layers * (layer + self.intermediate_size) + rows * self.hidden_size + head
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * self.hidden_size) + embeddings + self.hidden_size
