"""Text to token ids and back, without transformers, which would import torch.

Owns the vocabulary of one model. Knows nothing of requests or templates.
"""

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend

from tokenmill_engine.config.gguf_file import is_gguf
from tokenmill_engine.vocabulary.gguf_tokenizer import load_gguf_tokenizer
from tokenmill_engine.vocabulary.hf_tokenizer import load_hf_tokenizer
from tokenmill_engine.vocabulary.token_bytes import build_token_bytes, keeps_all_text
from tokenmill_server.processing.fast_encoder import make_fast_encoder
from tokenmill_server.processing.text_pairs import PairFrame, frame_of

logger = logging.getLogger(__name__)

# Requests are tokenized one at a time; thread pools of the libraries' own would only compete with the event loop.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

_MAX_INLINE_CHARS, _MAX_INLINE_CHARS_FAST = 4096, 16384
"""Longer texts are tokenized in a thread: about a millisecond of work, more would delay open streams."""


class Tokenizer:
    """Encodes and decodes. Decoding concatenates `token_bytes`; special tokens are those the model marks so."""

    def __init__(self, backend: Backend) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._fast = make_fast_encoder(backend)
        self._max_inline_chars = _MAX_INLINE_CHARS if self._fast is None else _MAX_INLINE_CHARS_FAST
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_bytes = build_token_bytes(backend)
        """Bytes of each id."""
        self.keeps_all_text = keeps_all_text(backend)
        """Whether a text has no more characters than the bytes of its tokens."""
        self.visible_bytes = list(self.token_bytes)
        """The same with nothing for special tokens."""
        for token_id in self.special_token_ids:
            self.visible_bytes[token_id] = b""

    @property
    def num_tokens(self) -> int:
        """Ids are 0..num_tokens-1; the model's own vocabulary may be padded beyond."""
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Names of special tokens in it become those tokens. Releases the GIL."""
        return self._encode_batch((text,), add_special_tokens)[0]

    async def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Like `encode` for each text, without blocking the event loop for long."""
        if sum(map(len, texts)) <= self._max_inline_chars:
            return [self.encode(text, add_special_tokens) for text in texts]
        return await asyncio.to_thread(self._encode_batch, texts, add_special_tokens)

    def _encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        if self._fast is not None:
            try:
                return [self._fast.encode(text, add_special_tokens).ids for text in texts]
            except Exception as error:  # of limits of its own; what is no text at all the other one refuses as well
                logger.info("fastokens failed, a text is encoded by tokenizers: %s", type(error).__name__)
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def pair_frame(self) -> PairFrame:
        """What is put around two texts in one prompt. Raises ConfigError as `frame_of`."""
        return frame_of(self._backend.encode("a", "b"))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of one token, special ones included; nothing for ids of the padded part of a vocabulary."""
        return self.token_bytes[token_id] if 0 <= token_id < len(self.token_bytes) else b""

    def token_string(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token."""
        return self._backend.id_to_token(token_id)

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Like `token_string` for each."""
        return [self._backend.id_to_token(token_id) for token_id in token_ids]

    def token_id(self, token: str) -> int | None:
        """Id of a token spelled as in the vocabulary."""
        return self._backend.token_to_id(token)


def load_tokenizer(path: str) -> Tokenizer:
    """Tokenizer of a folder in Hugging Face layout or of a GGUF file.

    Raises ConfigError if there is none, or one of a kind that cannot be reproduced exactly.
    """
    backend = load_gguf_tokenizer(path) if is_gguf(path) else load_hf_tokenizer(Path(path))
    return Tokenizer(backend)
