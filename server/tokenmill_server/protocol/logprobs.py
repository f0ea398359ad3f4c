"""Log-probabilities in the three shapes that clients know: chat, completions, `prompt_logprobs`."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tokenmill_server.processing.generation import RequestOutput, TokenLogprob
from tokenmill_server.processing.sse import json_bytes
from tokenmill_server.processing.tokenizer import Tokenizer

Json = dict[str, Any]


class LogprobFormatter:
    """Names tokens. With `as_token_ids` they are called `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def chat(self, entries: Iterable[TokenLogprob]) -> Json:
        """`logprobs` of a chat choice."""
        return {"content": [self._chat_entry(entry) for entry in entries]}

    def completion(self, entries: Sequence[TokenLogprob | None], texts: Sequence[str], offset: int) -> Json:
        """`logprobs` of a completions choice. `texts` are what the tokens add to the text, which joined is the text;
        `offset` is the length of the text before them. An entry is None where there is no probability."""
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else entry.logprob for entry in entries],
            "tokens": [
                text if entry is None or not self._as_token_ids else f"token_id:{entry.token_id}"
                for entry, text in zip(entries, texts, strict=True)
            ],
            "top_logprobs": _encoded(None if entry is None else self._completion_top(entry) for entry in entries),
        }

    def prompt(self, entries: Iterable[TokenLogprob | None]) -> msgspec.Raw:
        """`prompt_logprobs`: for each prompt token a map from token id to probability, rank and text."""
        return _encoded(None if entry is None else self._prompt_entry(entry) for entry in entries)

    def name(self, token_id: int) -> str:
        """Text of a token alone. Half a character is spelled as its bytes, as OpenAI does."""
        if self._as_token_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _chat_entry(self, entry: TokenLogprob) -> Json:
        top = [self._chat_token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._chat_token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        data = self._tokenizer.bytes_of(token_id)
        name = f"token_id:{token_id}" if self._as_token_ids else data.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(data)}

    def _completion_top(self, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]:
            top.setdefault(self.name(token_id), logprob)
        return top

    def _prompt_entry(self, entry: TokenLogprob) -> Json:
        ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
        own = (entry.token_id, entry.logprob, entry.rank)
        return {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self.name(token_id)}
            for token_id, logprob, rank in [*ranked, own]
        }


def num_logprobs(outputs: Iterable[RequestOutput]) -> int:
    """How many values an answer with `outputs` holds, about."""
    total = 0
    for output in outputs:
        prompt = output.prompt_logprobs or ()
        lists = [prompt] * len(output.outputs) + [choice.logprobs or () for choice in output.outputs]
        total += sum(len(entries) * (1 + len(entries[-1].top if entries[-1] else ())) for entries in lists if entries)
    return total


def _encoded(entries: Iterable[Json | None]) -> msgspec.Raw:
    """A JSON list. Encoded one by one, no entry lives long, and no single call keeps other threads from running."""
    return msgspec.Raw(b"[" + b",".join(map(json_bytes, entries)) + b"]")
