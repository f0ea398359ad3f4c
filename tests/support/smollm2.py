"""The embedded model's float32 reference: prompts with known greedy ids, and transformers on the weights of the file.

The weights are read with the `gguf` package alone, so that an error of our own loader cannot hide here.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

DATA = Path(__file__).parents[1] / "data"
CHAT_FILE = DATA / "smollm2_reference.json"
PROMPTS_FILE = DATA / "fidelity_prompts.json"
EOS_TOKEN_ID = 2

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and its greedy continuation by transformers in float32, which ends with the end token or at a limit."""

    name: str
    prompt_ids: list[int]
    greedy_ids: list[int]

    @property
    def all_ids(self) -> list[int]:
        return self.prompt_ids + self.greedy_ids


def chat_cases() -> list[Case]:
    """The three chats whose reference was made by transformers' own loader of GGUF files."""
    return [Case(row["prompt"], row["prompt_ids"], row["fp32_ids"]) for row in json.loads(CHAT_FILE.read_text())]


def mixed_cases() -> list[Case]:
    """A hundred prompts of 1 to 600 tokens, made by `tests/data/make_fidelity_prompts.py`."""
    return [Case(**row) for row in json.loads(PROMPTS_FILE.read_text())]


def chosen_cases() -> list[Case]:
    """Of those every length around the edge of a block, and some others up to the longest, passages and chats."""
    cases = mixed_cases()
    return cases[:19] + cases[19::4]


@dataclass(frozen=True, slots=True)
class Scores:
    """What the reference says of each token of a sequence but the first, given those before it. All [num_tokens - 1].

    `best` int64: the most likely token; `margins` float32: its logit less that of the next one; `logprobs` float32:
    log-probability of the token that is there.
    """

    best: torch.Tensor
    margins: torch.Tensor
    logprobs: torch.Tensor


class Reference:
    """SmolLM2 by transformers."""

    def __init__(self, path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = _load(Path(path)).to(device)
        for parameter in self.model.parameters():  # rotary frequencies, a buffer, stay as they are
            parameter.data = parameter.data.to(dtype)

    def score(self, token_ids: Sequence[int]) -> Scores:
        """Scores of one sequence, on the CPU."""
        ids = torch.tensor([token_ids], device=self.model.device)
        with torch.no_grad():
            logits = self.model(ids, use_cache=False).logits[0, :-1].float()
        top = logits.topk(2)
        logprobs = logits.log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        return Scores(top.indices[:, 0].cpu(), (top.values[:, 0] - top.values[:, 1]).cpu(), logprobs.cpu())

    def continue_greedily(self, prompt_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Token ids by transformers' own `generate`, with its cache."""
        ids = torch.tensor([prompt_ids], device=self.model.device)
        ends = {"eos_token_id": EOS_TOKEN_ID, "pad_token_id": EOS_TOKEN_ID}
        mask = torch.ones_like(ids)
        output = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, **ends)
        new: list[int] = output[0, len(prompt_ids) :].tolist()
        return new


def _load(path: Path) -> Any:
    """`LlamaForCausalLM` with the dequantized weights of a GGUF file of a Llama with tied embeddings."""
    import transformers

    reader = gguf.GGUFReader(path)

    def value(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    config: Any = transformers.LlamaConfig(
        vocab_size=value("vocab_size"),
        hidden_size=value("embedding_length"),
        intermediate_size=value("feed_forward_length"),
        num_hidden_layers=value("block_count"),
        num_attention_heads=value("attention.head_count"),
        num_key_value_heads=value("attention.head_count_kv"),
        max_position_embeddings=value("context_length"),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in num_heads:
            values = _halves_from_pairs(values, num_heads[part])
        weights[_name_in_transformers(tensor.name)] = torch.from_numpy(values.copy())
    model: Any = transformers.LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == ["lm_head.weight"], "all but the output matrix, which is that of the embedding"
    return model.eval()


def _name_in_transformers(name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`."""
    if name.startswith("blk."):
        _, layer, part, _ = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
    return {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]


def _halves_from_pairs(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows [num_heads * head_dim, hidden] in the order of rotary halves; files of this kind have rotary pairs."""
    return rows.reshape(num_heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
