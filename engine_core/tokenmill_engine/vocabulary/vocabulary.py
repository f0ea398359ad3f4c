"""What each token id of a model writes, for whoever has to foresee text but tokenizes none."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as Backend

from tokenmill_engine.config.gguf_file import is_gguf
from tokenmill_engine.vocabulary.gguf_tokenizer import load_gguf_tokenizer
from tokenmill_engine.vocabulary.hf_tokenizer import load_hf_tokenizer
from tokenmill_engine.vocabulary.token_bytes import build_token_bytes

_LONGEST_SPELLED: Final = 32
"""Bytes of a token that is looked for."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model."""

    token_bytes: list[bytes]
    """[vocab_size] bytes of each id; special tokens, and ids that no token has, write nothing."""
    special_token_ids: frozenset[int]
    end_token_ids: tuple[int, ...]
    """Those that end a text, all within the vocabulary."""
    backend: Backend

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of text in the middle of another, none of them special. They write it and nothing else: where
        the tokenizer's would not, as for the name of a special token or characters that it normalizes, they are the
        longest that do. Empty if there are none."""
        for before in ("", "\n"):  # Some tokenizers put a space in front of a text, but not in it.
            num_before = len(self._ids(before))
            token_ids = self._ids(before + text)[num_before:]
            if b"".join(map(self.token_bytes.__getitem__, token_ids)) == text.encode():
                return token_ids
        return self._spelled(text.encode())

    def _spelled(self, data: bytes) -> list[int]:
        """The longest tokens that write `data`, from the left."""
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + _LONGEST_SPELLED), start, -1)
            end = next((end for end in ends if data[start:end] in self._by_bytes), start)
            if end == start:
                return []
            token_ids.append(self._by_bytes[data[start:end]])
            start = end
        return token_ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {written: token_id for token_id, written in enumerate(self.token_bytes) if written}

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        return ids


def read_backend(path: str) -> Backend:
    """The tokenizer of a folder in Hugging Face layout or of a GGUF file.

    Raises ConfigError if there is none, or one of a kind that cannot be reproduced exactly.
    """
    return load_gguf_tokenizer(path) if is_gguf(path) else load_hf_tokenizer(Path(path))


def read_vocabulary(path: str, vocab_size: int, end_token_ids: tuple[int, ...]) -> Vocabulary:
    """The tokens that `read_backend(path)` has, for a model whose logits are `vocab_size` numbers."""
    backend = read_backend(path)
    specials = frozenset(token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special)
    written = build_token_bytes(backend)[:vocab_size]
    written += [b""] * (vocab_size - len(written))
    for token_id in specials | set(end_token_ids):
        if token_id < vocab_size:
            written[token_id] = b""
    return Vocabulary(written, specials, tuple(each for each in end_token_ids if each < vocab_size), backend)
