"""The bytes that each vocabulary entry stands for.

Both tokenizer families of models that generate text (byte-level BPE and SentencePiece with byte fallback) decode by
concatenation, so a table of bytes turns detokenization into one look-up per token. Text is only made of whole UTF-8
characters. Of WordPiece, which text encoders have, the bytes are those of the pieces, without what is between words.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Backend

from tokenmill_engine.errors import ConfigError

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def build_token_bytes(backend: Backend) -> list[bytes]:
    """Bytes of every id, `table[token_id]`; ids that no token has are empty.

    Raises ConfigError if the tokenizer's decoder does more than concatenate.
    """
    kinds = set(_decoder_kinds(backend))
    if "ByteLevel" in kinds:
        convert = _byte_level_bytes
    elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        convert = _sentencepiece_bytes
    elif kinds == {"WordPiece"}:
        convert = _wordpiece_bytes
    else:
        names = ", ".join(sorted(kinds)) or "none"
        raise ConfigError(
            f"the tokenizer's decoder ({names}) is not supported; byte-level BPE, SentencePiece and WordPiece are"
        )
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = convert(token)
    return table


def keeps_all_text(backend: Backend) -> bool:
    """Whether each character of a text is in one of its tokens. WordPiece drops spaces and makes one token of a long
    word that it does not know."""
    return "WordPiece" not in set(_decoder_kinds(backend))


def incomplete_tail(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a UTF-8 character without finishing it."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead < 0x80:
            return b""
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[-length:] if length < needed else b""
    return b""


def _decoder_kinds(backend: Backend) -> Iterator[str]:
    if backend.decoder is None:
        return
    state = json.loads(backend.decoder.__getstate__())
    pending: list[dict[str, Any]] = [state]
    while pending:
        part = pending.pop()
        if part["type"] == "Sequence":
            pending.extend(part["decoders"])
        else:
            yield part["type"]


def _byte_alphabet() -> dict[int, int]:
    """Code point -> byte of the alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others
    for the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: byte for byte in printable}
    others = [byte for byte in range(256) if byte not in alphabet]
    return alphabet | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_CODE_POINT = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CODE_POINT[ord(character)] for character in token])
    except KeyError:  # an added token with characters outside the alphabet stands for itself
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.match(token)
    return bytes([int(match[1], 16)]) if match else token.replace(_SPACE_MARK, " ").encode()


def _wordpiece_bytes(token: str) -> bytes:
    return token.removeprefix("##").encode()
