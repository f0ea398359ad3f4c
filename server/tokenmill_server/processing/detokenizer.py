"""Turns the tokens of one sequence into text as they come. Never splits a character, never repeats the prompt.

Text is the concatenation of the tokens' bytes, decoded as UTF-8. Bytes that may still become a character wait for
the rest; at the end of the sequence they are dropped. So the text does not depend on how tokens are grouped.
"""

import codecs
from collections.abc import Sequence

from tokenmill_engine.vocabulary.token_bytes import incomplete_tail
from tokenmill_server.processing.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")

_MAX_TAIL_TOKENS = 4
"""A character has at most four bytes, so the unfinished one lies in the last four tokens that have any."""


class Detokenizer:
    """Text of one generated sequence. With `skip_special_tokens`, special tokens leave no trace."""

    __slots__ = ("_decoder", "_prompt_tail", "_table")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()) -> None:
        self._table = tokenizer.visible_bytes if skip_special_tokens else tokenizer.token_bytes
        self._decoder: codecs.BufferedIncrementalDecoder | None = None
        """None until there is text that is not ASCII."""
        self._prompt_tail = prompt_tail(tokenizer, prompt_token_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; possibly none."""
        try:
            if len(token_ids) == 1:
                data = self._table[token_ids[0]]
            else:
                data = b"".join([self._table[token_id] for token_id in token_ids])
        except IndexError:  # ids of the padded part of the model's vocabulary stand for nothing
            size = len(self._table)
            data = b"".join([self._table[token_id] for token_id in token_ids if token_id < size])
        if self._prompt_tail and data:
            data = self._continue_prompt(data)
        decoder = self._decoder
        if data.isascii() and (decoder is None or not decoder.buffer):  # nearly always, and in a fraction of the time
            return data.decode("ascii")
        if decoder is None:
            decoder = self._decoder = _UTF8("replace")
        return decoder.decode(data)

    def _continue_prompt(self, data: bytes) -> bytes:
        """A prompt may end inside a character. If the output goes on with it the character belongs to the output,
        else the fragment is the prompt's affair."""
        tail, self._prompt_tail = self._prompt_tail, b""
        return tail + data if data[0] & 0xC0 == 0x80 else data


def prompt_tail(tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> bytes:
    """The bytes of an unfinished character at the end of a prompt."""
    table = tokenizer.visible_bytes
    size = len(table)
    last = [table[token_id] for token_id in prompt_token_ids[-_MAX_TAIL_TOKENS:] if token_id < size]
    return incomplete_tail(b"".join(last))
