"""Device-side description of one step for the model: which tokens, where their keys and values go, who sees what."""

from dataclasses import dataclass, field

import torch

from tokenmill_kernels import ops


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What layers have in common that can share the plan of a step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """Tokens that a query sees; None for all before it."""

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.head_dim**-0.5)


@dataclass(slots=True)
class KVGroupBatch:
    """Block tables of the step's requests for one KV group."""

    block_tables: torch.Tensor
    """int32 [num_reqs, max_blocks]; entries past a request's length are undefined but in range."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block_id * block_size + offset where each key and value is written; -1 writes nothing."""


@dataclass(slots=True)
class MediaRows:
    """Tokens of a step that stand for rows of an encoder's output."""

    tokens: torch.Tensor
    """int64 [num_rows]: places in the batch, no two alike."""
    rows: torch.Tensor
    """[num_rows, hidden_size] of the model's dtype: what takes the place of their embeddings. With DeepStack rows are
    longer: what is added behind each of the first layers follows. Of several workers each has a part of this sum."""


@dataclass(slots=True)
class ForwardBatch:
    """Any mix of prefill chunks and decodes, requests with one token first. Tensors may be padded past
    `num_tokens` and `num_reqs` (CUDA graphs): padded requests have length 0, padded tokens slot -1."""

    input_ids: torch.Tensor
    """int32 [num_tokens]"""
    positions: torch.Tensor
    """int32 [num_tokens]; or, for a model with M-RoPE, [3, num_tokens] in time, height and width. Where these are the
    same for all tokens, one will do. They turn queries and keys; who sees what follows from `seq_lens`."""
    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1]: prefix sum of the tokens of each request in this step."""
    seq_lens: torch.Tensor
    """int32 [num_reqs]: computed tokens after this step, = context visible to the request's last token."""
    groups: list[KVGroupBatch]
    num_reqs: int
    num_tokens: int
    num_decodes: int
    """The first `num_decodes` requests have exactly one token."""
    max_query_len: int
    max_seq_len: int
    """Host-side upper bounds, for launch shapes only."""
    any_mix: bool = False
    """The launches are recorded for any mix of chunks and decodes of at most these sizes: `num_decodes` is no count,
    only not 0."""
    media: MediaRows | None = None
    """For models that look at images."""
    embeddings: torch.Tensor | None = None
    """[num_tokens, hidden_size] in place of those of `input_ids`, with the rows of `media` among them. This and the
    next two are made by the model when the forward pass begins."""
    deepstack: torch.Tensor | None = None
    """[num_rows, n * hidden_size]: what is added to the tokens of `media` behind each of the first n layers
    (arXiv:2406.04334)."""
    cos_sin: torch.Tensor | None = None
    """float32 [num_tokens, rotary_dim] in place of the model's own table; `positions` name rows of this one then."""
    plans: dict[AttentionShape, ops.AttentionPlan | None] = field(default_factory=dict)
    """Made by the attention backend when the forward pass begins."""
