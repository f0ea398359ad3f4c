"""Which tensor of a checkpoint fills which parameter, and whether they fit. Knows names and shapes, reads no data."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.layers.placement import Share, Target
from tokenmill_engine.models.loadable import Loadable

Shapes = Mapping[str, tuple[int, ...]]

_MAX_NAMES_SHOWN = 5

_COMPUTED_CONSTANTS = re.compile(r"rotary_emb\.inv_freq$|^rope_freqs\.weight$")
"""Tensors that some checkpoints carry and we compute from the configuration."""

_HF_NAME = re.compile(r"^(?:model\.)?(?:layers\.(?P<layer>\d+)\.)?(?P<part>.+)\.(?P<kind>weight|bias)$")

_GGUF_PARTS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
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


@dataclass(frozen=True, slots=True)
class Destination:
    """A tensor of the checkpoint and the parameter that it, or a part of it, fills."""

    name: str
    """The checkpoint's own name."""
    target: torch.Tensor
    """A view of the parameter whose elements, in row-major order, are in the order of the checkpoint. Its first
    dimension counts whole rows of the checkpoint's tensor or of the part, or whole groups of rows."""
    part: tuple[Share, ...]
    """Of the checkpoint's tensor, along each of its dimensions."""

    @property
    def key(self) -> str:
        """No other destination's: several may take their parts of one tensor."""
        return f"{self.name} from {self.part[0].first}"


def match_safetensors(model: Loadable, shapes: Shapes, source: str) -> list[Destination]:
    """Destinations of a Hugging Face checkpoint. Raises ConfigError as `_match`."""
    spelled = {own: name for name in shapes if (own := model.own_name(name)) is not None}
    destinations = _match(model.targets(), shapes, source, lambda own: spelled.get(own, own))
    ignored = {"lm_head.weight"} if model.architecture.tie_word_embeddings else set()
    _refuse_unexpected(spelled.keys() - ignored, model.parameter_names(), source)
    return destinations


def match_gguf(model: Loadable, shapes: Shapes, source: str) -> list[Destination]:
    """Destinations of a GGUF file. Raises ConfigError as `_match`.

    Files of architecture `llama` hold the rows of q and k in the order of interleaved rotation: within each head, row
    2i + j of the file is row j * head_dim / 2 + i for us.
    """
    destinations = _match(model.targets(), shapes, source, _gguf_name)
    _refuse_unexpected(shapes.keys(), map(_gguf_name, model.parameter_names()), source)
    if model.architecture.name not in ("LlamaForCausalLM", "MistralForCausalLM"):
        return destinations
    return [_interleaved(destination, model.architecture) for destination in destinations]


def _interleaved(destination: Destination, architecture: ArchitectureConfig) -> Destination:
    if not re.search(r"attn_[qk]\.(weight|bias)$", destination.name):
        return destination
    target, half = destination.target, architecture.head_dim // 2
    per_head = target.view(-1, 2, half, *target.shape[1:]).transpose(1, 2)
    return Destination(destination.name, per_head, destination.part)


def _gguf_name(name: str) -> str:
    match = _HF_NAME.match(name)
    if match is None:
        raise ValueError(f"parameter {name} has no GGUF name")
    prefix = f"blk.{match['layer']}." if match["layer"] is not None else ""
    return f"{prefix}{_GGUF_PARTS[match['part']]}.{match['kind']}"


def _match(
    targets: Mapping[str, Target], shapes: Shapes, source: str, rename: Callable[[str], str]
) -> list[Destination]:
    """One destination for every parameter. Raises ConfigError, naming tensors, if some are absent or of another
    shape than the configuration says."""
    expected = {rename(name): target for name, target in targets.items()}
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ConfigError(f"{source} lacks {len(missing)} tensor(s) of its architecture: {_some(missing)}")
    misshapen = [
        f"{name} is {list(shapes[name])}, expected {list(target.shape)}"
        for name, target in expected.items()
        if shapes[name] != target.shape
    ]
    if misshapen:
        raise ConfigError(f"{source} has {len(misshapen)} tensor(s) of the wrong shape: {_some(misshapen)}")
    return [Destination(name, part.view, part.part) for name, target in expected.items() for part in target.single()]


def _refuse_unexpected(names: Iterable[str], known_names: Iterable[str], source: str) -> None:
    """Raises ConfigError if the checkpoint has more than the whole model, whatever stage of it this is."""
    known = set(known_names)
    unexpected = sorted(name for name in names if name not in known and not _COMPUTED_CONSTANTS.search(name))
    if unexpected:
        raise ConfigError(
            f"{source} has {len(unexpected)} tensor(s) that its architecture does not know: {_some(unexpected)}"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return shown if len(names) <= _MAX_NAMES_SHOWN else f"{shown}, …"
