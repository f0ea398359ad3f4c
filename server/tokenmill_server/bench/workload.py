"""What the load generator sends and when: random prompts of exact length, and arrival times.

The prompts of one seed are the same on every machine, so runs against different servers see the same work.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

_MAX_ROUNDS = 16


@dataclass(slots=True, frozen=True)
class RandomShape:
    """Lengths in tokens. Input and output lengths are drawn evenly from [len * (1 - ratio), len * (1 + ratio)];
    `prefix_len` tokens, the same for every prompt, come before the input."""

    input_len: int
    output_len: int
    range_ratio: float = 0.0
    prefix_len: int = 0

    def draw(self, length: int, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        low = max(1, math.floor(length * (1 - self.range_ratio)))
        high = math.ceil(length * (1 + self.range_ratio))
        return rng.integers(low, max(low, high) + 1, size=count)


@dataclass(slots=True, frozen=True)
class Prompt:
    """One request: text or token ids, its length and how many tokens to ask for."""

    content: str | list[int]
    num_tokens: int
    output_len: int
    offset_s: float | None = None
    """When it was sent, from the start of a recorded run."""


def id_prompts(shape: RandomShape, count: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts as token ids, drawn from the upper 98 % of the vocabulary (special tokens usually come first)."""
    rng = np.random.default_rng(seed)
    first = vocab_size // 50
    prefix = rng.integers(first, vocab_size, size=shape.prefix_len).tolist()
    input_lens = shape.draw(shape.input_len, count, rng)
    output_lens = shape.draw(shape.output_len, count, rng)
    prompts = []
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        ids = prefix + rng.integers(first, vocab_size, size=int(input_len)).tolist()
        prompts.append(Prompt(ids, len(ids), int(output_len)))
    return prompts


def text_prompts(shape: RandomShape, count: int, tokenizer: Tokenizer, seed: int) -> list[Prompt]:
    """Prompts as text that encodes, special tokens included, to the wanted number of tokens.

    Random ids are decoded and encoded again; where neighbours merged or split, ids are added or cut until the
    length fits. A rare prompt that never settles keeps its nearest length, which `num_tokens` states.
    """
    rng = np.random.default_rng(seed)
    usable = printable_ids(tokenizer)
    special = tokenizer.num_special_tokens_to_add(False)
    prefix = rng.choice(usable, size=shape.prefix_len).tolist()
    input_lens = shape.draw(shape.input_len, count, rng)
    output_lens = shape.draw(shape.output_len, count, rng)
    targets = [max(1, shape.prefix_len + int(length) - special) for length in input_lens]
    ids = [prefix + rng.choice(usable, size=max(0, target - len(prefix))).tolist() for target in targets]
    texts, lengths = fit_texts(ids, targets, usable, tokenizer, rng)
    return [
        Prompt(text, length + special, int(output_len))
        for text, length, output_len in zip(texts, lengths, output_lens, strict=True)
    ]


def fit_texts(
    ids: list[list[int]],
    targets: list[int],
    usable: NDArray[np.int64],
    tokenizer: Tokenizer,
    rng: np.random.Generator,
) -> tuple[list[str], list[int]]:
    """Texts of `ids`, changed until text i encodes to `targets[i]` tokens, and the lengths reached."""
    texts = [""] * len(ids)
    lengths = [0] * len(ids)
    pending = list(range(len(ids)))
    for _ in range(_MAX_ROUNDS):
        decoded = tokenizer.decode_batch([ids[i] for i in pending], skip_special_tokens=False)
        encoded = tokenizer.encode_batch(decoded, add_special_tokens=False)
        for i, text, encoding in zip(pending, decoded, encoded, strict=True):
            texts[i], lengths[i] = text, len(encoding.ids)
            missing = targets[i] - lengths[i]
            ids[i] = encoding.ids[: targets[i]] + rng.choice(usable, size=max(0, missing)).tolist()
        pending = [i for i in pending if lengths[i] != targets[i]]
        if not pending:
            break
    return texts, lengths


def printable_ids(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Ids that decode to whole characters on their own."""
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=False)
    texts = tokenizer.decode_batch([[token_id] for token_id in range(vocab_size)], skip_special_tokens=True)
    return np.asarray([token_id for token_id, text in enumerate(texts) if text and "\ufffd" not in text])


def arrival_times(count: int, request_rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Seconds after the start at which each request is sent.

    Gaps follow a gamma distribution of shape `burstiness` (1 is a Poisson process, less is burstier), scaled so
    that the last request leaves exactly at count / request_rate. An infinite rate sends everything at once.
    """
    if math.isinf(request_rate):
        return np.zeros(count)
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0 / (request_rate * burstiness), size=count)
    times: NDArray[np.float64] = np.cumsum(gaps)
    times *= count / request_rate / times[-1]
    return times
