from typing import Any

import pytest

from tests.support.scripted_server import DONE, event, text_event, usage_event
from tokenmill_server.bench.event_stream import StreamSink
from tokenmill_server.bench.metrics import RequestRecord


def parse(data: bytes, step: int) -> RequestRecord:
    """Feed an event stream in pieces of `step` bytes, a second apart."""
    record = RequestRecord(prompt_tokens=3, max_tokens=4)
    sink = StreamSink(record)
    for index, start in enumerate(range(0, len(data), step)):
        sink.on_body(data[start : start + step], float(index))
    sink.close()
    return record


def counted_event(text: str, num_tokens: int, finish: str | None = None) -> bytes:
    """A chunk that says how many tokens there have been so far."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish}
    return event({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}})


@pytest.mark.parametrize("step", [1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_may_be_cut_anywhere(step: int, newline: bytes) -> None:
    chunk = {"choices": [{"index": 0, "text": "é€😀", "finish_reason": None}]}
    stream = b": ping" + newline * 2 + event(chunk, newline) * 3 + event("[DONE]", newline)
    record = parse(stream, step)
    assert record.error is None
    assert record.text == "é€😀" * 3
    assert len(record.token_times_s) == 3


def test_only_output_counts_as_output_in_chat() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "hi"}, {"reasoning": "hm"}, {"content": None}, {}]
    stream = b"".join(event({"choices": [{"delta": delta, "finish_reason": None}]}) for delta in deltas)
    stream += event({"choices": [{"delta": {}, "finish_reason": "stop"}]}) + usage_event(3, 9) + DONE
    record = parse(stream, 10_000)
    assert record.error is None
    assert record.text == "hihm"
    assert len(record.token_times_s) == 2
    assert record.output_tokens == 9


def test_tokens_of_a_chat_without_text_count_where_their_ids_come() -> None:
    choices: list[dict[str, Any]] = [
        {"delta": {"role": "assistant", "content": ""}},
        {"delta": {"content": ""}, "token_ids": [7]},
        {"delta": {"content": "a"}, "token_ids": [8]},
        {"delta": {}, "token_ids": [], "finish_reason": "stop"},
    ]
    record = parse(b"".join(event({"choices": [choice]}) for choice in choices) + DONE, 10_000)
    assert record.error is None
    assert len(record.token_times_s) == 2


def test_tokens_that_all_lack_text_come_with_the_end() -> None:
    record = parse(text_event("", "length") + usage_event(3, 4) + DONE, 10_000)
    assert record.error is None
    assert record.output_tokens == 4
    assert record.token_times_s == [record.end_s]


def test_a_completion_token_without_text_counts_but_an_empty_last_chunk_does_not() -> None:
    stream = text_event("") + text_event("a") + text_event("", "stop") + DONE
    record = parse(stream, 10_000)
    assert len(record.token_times_s) == 2


def test_arrivals_are_those_of_an_events_last_byte() -> None:
    pieces = [text_event("a")[:9], text_event("a")[9:] + text_event("b"), text_event("c", "length") + DONE]
    record = RequestRecord(prompt_tokens=3, max_tokens=4)
    sink = StreamSink(record)
    for now_s, piece in zip((1.0, 2.5, 4.0), pieces, strict=True):
        sink.on_body(piece, now_s)
    assert sink.num_bytes == sum(map(len, pieces))
    sink.close()
    assert record.token_times_s == [2.5, 2.5, 4.0]
    assert record.itl_s == [0.0, 1.5]
    assert record.end_s == 4.0
    assert sink.num_bytes == 0


def test_a_chunk_with_several_tokens_counts_as_many() -> None:
    events = [counted_event("a", 1), counted_event("bcd", 4), counted_event("e", 5, "length"), DONE]
    record = RequestRecord(prompt_tokens=3, max_tokens=5)
    sink = StreamSink(record)
    for now_s, piece in enumerate(events):
        sink.on_body(piece, float(now_s))
    sink.close()
    assert record.token_times_s == [0.0, 1.0, 1.0, 1.0, 2.0]
    assert record.itl_s == [1.0, 0.0, 0.0, 1.0]
    assert (record.num_chunks, record.output_tokens) == (3, 5)


def test_a_token_without_text_comes_with_the_next_chunk_that_says_so() -> None:
    skipped = event({"choices": [{"delta": {}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})
    record = parse(counted_event("a", 1) + skipped + counted_event("b", 3, "length") + DONE, 10_000)
    assert len(record.token_times_s) == 3
    assert record.num_chunks == 2


def test_usage_in_the_last_chunk_alone_says_nothing_about_that_chunk() -> None:
    record = parse(text_event("a") + text_event("b") + counted_event("c", 7, "length") + DONE, 10_000)
    assert len(record.token_times_s) == 3
    assert record.output_tokens == 7


def test_tokens_without_text_and_without_usage_are_an_answer_too() -> None:
    record = parse(text_event("", "length") + DONE, 10_000)
    assert record.error is None
    assert record.token_times_s == [record.end_s]
