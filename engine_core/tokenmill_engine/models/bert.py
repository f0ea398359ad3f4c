"""BERT (arXiv:1810.04805): texts in, one hidden state of each token out; and the head that scores pairs of texts.

Plain torch on every device: there is no cache, and a text is read in one step. Tensors are [num_tokens, ...] over all
texts of a step.
"""

import re
from collections.abc import Callable

import torch
from torch.nn import functional

from tokenmill_engine.config.architecture import Activation
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.layers.placement import Target
from tokenmill_engine.models.dense_decoder import TORCH_DTYPES
from tokenmill_engine.models.text_batch import TextBatch, TextGroup

_UNUSED = re.compile(r"^(?:pooler\.|cls\.|embeddings\.position_ids$)")
"""What was there for training, and constants."""


def _activations() -> dict[Activation, Callable[[torch.Tensor], torch.Tensor]]:
    return {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
    }


class BertEncoder:
    """Constructed empty; `loader.WeightLoading` fills it."""

    is_fused = False

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        architecture, encoder = config.architecture, config.architecture.text_encoder
        if encoder is None:
            raise ValueError(f"{architecture.name} is no text encoder")
        self.architecture, self.device, self.dtype = architecture, device, TORCH_DTYPES[config.dtype]
        self._activate = _activations()[encoder.activation]
        self._targets: dict[str, torch.Tensor] = {}
        hidden, inner = architecture.hidden_size, architecture.intermediate_size
        self._words = self._add("embeddings.word_embeddings.weight", architecture.vocab_size, hidden)
        self._positions = self._add("embeddings.position_embeddings.weight", encoder.num_positions, hidden)
        self._kinds = self._add("embeddings.token_type_embeddings.weight", encoder.num_types, hidden)
        self._norm = self._add_norm("embeddings.LayerNorm")
        self._pooler: _Linear | None = None
        self._layers = [self._add_layer(f"encoder.layer.{index}.", inner) for index in range(architecture.num_layers)]
        if encoder.scores_pairs:
            self._pooler = self._add_linear("pooler.dense", hidden, hidden)
            self._classifier = self._add_linear("classifier", 1, hidden)

    def targets(self) -> dict[str, Target]:
        """As in `Loadable`."""
        return {name: Target.of_whole(tensor) for name, tensor in self._targets.items()}

    def parameter_names(self) -> list[str]:
        """As in `Loadable`."""
        return list(self._targets)

    def own_name(self, name: str) -> str | None:
        """As in `Loadable`. Checkpoints of models with a head have a prefix, old ones another spelling of norms."""
        name = name.removeprefix("bert.")
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        return None if _UNUSED.match(name) and name not in self._targets else name

    def finalize(self, allow_fused: bool = True) -> None:
        """Nothing is packed."""

    def forward(self, batch: TextBatch) -> torch.Tensor:
        """Final hidden states [num_tokens, hidden_size]."""
        embedded = self._words[batch.token_ids] + self._kinds[batch.kinds] + self._positions[batch.positions]
        hidden = self._norm(embedded)
        for layer in self._layers:
            hidden = layer(hidden, batch)
        return hidden

    @property
    def scores_pairs(self) -> bool:
        """Whether there is what `score` needs."""
        return self._pooler is not None

    def score(self, first: torch.Tensor) -> torch.Tensor:
        """From the hidden states of first tokens [num_texts, hidden_size] to scores [num_texts, 1]."""
        if self._pooler is None:
            raise ValueError(f"{self.architecture.name} scores nothing")
        return self._classifier(torch.tanh(self._pooler(first)))

    def _add(self, name: str, *shape: int) -> torch.Tensor:
        self._targets[name] = tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        return tensor

    def _add_norm(self, name: str) -> "_Norm":
        size = self.architecture.hidden_size
        weight, bias = self._add(f"{name}.weight", size), self._add(f"{name}.bias", size)
        return _Norm(weight, bias, self.architecture.rms_norm_eps)

    def _add_linear(self, name: str, rows: int, columns: int) -> "_Linear":
        return _Linear(self._add(f"{name}.weight", rows, columns), self._add(f"{name}.bias", rows))

    def _add_layer(self, prefix: str, inner: int) -> "_Layer":
        size = self.architecture.hidden_size
        layer = _Layer()
        layer.num_heads, layer.activate = self.architecture.num_heads, self._activate
        weight = torch.empty((3 * size, size), dtype=self.dtype, device=self.device)
        bias = torch.empty(3 * size, dtype=self.dtype, device=self.device)
        layer.qkv = _Linear(weight, bias)
        for index, name in enumerate(("query", "key", "value")):
            rows = slice(index * size, (index + 1) * size)
            self._targets[f"{prefix}attention.self.{name}.weight"] = weight[rows]
            self._targets[f"{prefix}attention.self.{name}.bias"] = bias[rows]
        layer.output = self._add_linear(f"{prefix}attention.output.dense", size, size)
        layer.attention_norm = self._add_norm(f"{prefix}attention.output.LayerNorm")
        layer.up = self._add_linear(f"{prefix}intermediate.dense", inner, size)
        layer.down = self._add_linear(f"{prefix}output.dense", size, inner)
        layer.output_norm = self._add_norm(f"{prefix}output.LayerNorm")
        return layer


class _Linear:
    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class _Norm:
    __slots__ = ("bias", "epsilon", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, epsilon: float) -> None:
        self.weight, self.bias, self.epsilon = weight, bias, epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class _Layer:
    """Attention and feed-forward, each with what went in added and a norm behind."""

    __slots__ = ("activate", "attention_norm", "down", "num_heads", "output", "output_norm", "qkv", "up")

    num_heads: int
    activate: Callable[[torch.Tensor], torch.Tensor]
    qkv: _Linear
    output: _Linear
    attention_norm: _Norm
    up: _Linear
    down: _Linear
    output_norm: _Norm

    def __call__(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        qkv = self.qkv(hidden).view(len(hidden), 3, self.num_heads, -1)
        attended = torch.empty_like(hidden)
        for group in batch.groups:
            self._attend(qkv, group, attended)
        hidden = self.attention_norm(self.output(attended) + hidden)
        return self.output_norm(self.down(self.activate(self.up(hidden))) + hidden)

    def _attend(self, qkv: torch.Tensor, group: TextGroup, out: torch.Tensor) -> None:
        """qkv [num_tokens, 3, num_heads, head_dim]; writes the rows of `out` [num_tokens, hidden_size] that are the
        group's."""
        queries, keys, values = qkv[group.tokens].permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
        rows = mixed.transpose(1, 2).flatten(2).flatten(0, 1)
        out[group.tokens.flatten()[group.places]] = rows[group.places]
