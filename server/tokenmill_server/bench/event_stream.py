"""Reads a recorded OpenAI event stream: which tokens came when, what text they made, how the request ended.

While a stream runs its bytes are only kept, with the time of each arrival. Parsing waits until nothing is measured any
more, so it delays no other stream and costs the server under test nothing.
"""

from array import array
from typing import Any

import msgspec

from tokenmill_server.bench.metrics import RequestRecord


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct, gc=False):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class StreamSink:
    """Keeps the body of one streamed response for `record`, which `close` fills.

    A chunk counts as output when it carries text or token ids, or when it is a plain completion chunk that does not end
    the request (a token may have no text of its own). Role-only, usage-only and finish-only chunks do not count, unless
    there were tokens and none of them had text: they came with the end.

    A chunk stands for one token, or for as many as its own usage says it adds: they arrived together.
    """

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.num_bytes = 0
        """Held until `close`."""
        self._pieces: list[bytes] = []
        self._arrivals_s = array("d")
        self._done = False
        self._finished = False
        self._usage_tokens = 0
        self._text: list[str] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        self._pieces.append(data)
        self._arrivals_s.append(now_s)
        self.num_bytes += len(data)

    def close(self) -> None:
        """The response is over: settle times, text, token count and whether it was a success."""
        record = self.record
        try:
            self._parse()
        except msgspec.MsgspecError as error:
            record.error = record.error or f"malformed event: {error}"
        self._pieces.clear()
        self.num_bytes = 0
        record.text = "".join(self._text)
        record.output_tokens = self._usage_tokens
        if not record.token_times_s and (self._usage_tokens or self._finished):
            record.token_times_s.append(record.end_s)
        if record.error is None and not record.token_times_s:
            record.error = "the response held no generated token"
        elif record.error is None and not (self._done or self._finished):
            record.error = "the stream ended before a finish reason or [DONE]"

    def _parse(self) -> None:
        """Every complete line, with the time at which its last byte came."""
        piece = 0
        received = len(self._pieces[0]) if self._pieces else 0
        end = 0
        for line in b"".join(self._pieces).split(b"\n")[:-1]:
            end += len(line) + 1
            while received < end:
                piece += 1
                received += len(self._pieces[piece])
            if line.startswith(b"data:"):
                self._on_data(line[5:], self._arrivals_s[piece])

    def _on_data(self, payload: bytes, now_s: float) -> None:
        if self._done or payload.strip() == b"[DONE]":
            self._done = True
            return
        record = self.record
        chunk = _decode_chunk(payload)
        num_new = 1
        if chunk.usage is not None:
            num_known = len(record.token_times_s)
            if self._usage_tokens >= num_known:  # so far every chunk had a count, not the last one alone
                num_new = max(1, chunk.usage.completion_tokens - num_known)
            self._usage_tokens = chunk.usage.completion_tokens
        if chunk.error is not None:
            record.error = str(chunk.error)
        if chunk.choices:
            choice = chunk.choices[0]
            record.end_s = now_s
            self._finished = self._finished or choice.finish_reason is not None
            if self._is_output(choice):
                record.num_chunks += 1
                record.token_times_s.extend([now_s] * num_new)

    def _is_output(self, choice: _Choice) -> bool:
        delta = choice.delta
        if delta is None:
            if choice.text:
                self._text.append(choice.text)
                return True
            return choice.finish_reason is None
        text = delta.content or delta.reasoning or delta.reasoning_content
        if text:
            self._text.append(text)
        return bool(text or choice.token_ids) or delta.tool_calls is not None
