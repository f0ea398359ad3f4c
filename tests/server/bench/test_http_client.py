import asyncio
import re
from collections.abc import Callable

import pytest

from tests.support.scripted_server import DONE, Reply, Script, ScriptedServer, event, text_event
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.metrics import RequestRecord

Start = Callable[[Script], ScriptedServer]


def fetch(url: str, count: int = 1) -> list[RequestRecord]:
    """`count` streamed requests, one after another, over one client."""

    async def run() -> list[RequestRecord]:
        client = HttpClient(url, {"Authorization": "Bearer k"})
        records = [RequestRecord(prompt_tokens=3, max_tokens=4) for _ in range(count)]
        for record in records:
            (await client.stream("/v1/completions", b'{"prompt": "x"}', record)).close()
        client.close()
        return records

    return asyncio.run(run())


def test_times_are_those_of_the_server(scripted_server: Start) -> None:
    pieces = [(0.12, text_event("a")), (0.05, text_event("b")), (0.08, text_event("c", "length")), (0, DONE)]
    server = scripted_server(lambda seen, index: Reply(pieces))
    delays_s = []
    for record, known in zip(fetch(server.url, count=6), server.seen, strict=True):
        assert record.error is None
        assert record.text == "abc"
        assert len(record.token_times_s) == 3
        delays_s.append([seen - sent for seen, sent in zip(record.token_times_s, known.sent_s, strict=False)])
        assert record.ttft_s >= 0.12
        assert record.e2el_s >= 0.25
        assert record.end_s == record.token_times_s[-1]
    # Nothing is seen before it was sent; what was sent is seen at once, unless the machine has other work.
    for delays_of_piece in zip(*delays_s, strict=True):
        assert 0.0 <= min(delays_of_piece) <= 0.1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([(0, b'{"error": {"message": "too long"}}')], status=400, framing="length"), "HTTP 400: .*too long"),
        (Reply([(0, text_event("a")), (0, event({"error": {"message": "engine died"}})), (0, DONE)]), "engine died"),
        (Reply([(0, text_event("a"))], drop=True), "closed the connection"),
        (Reply([(0, text_event("a"))]), r"ended before a finish reason or \[DONE\]"),
        (Reply([(0, DONE)]), "no generated token"),
        (Reply([(0, b"data: {broken}\n\n")]), "malformed"),
    ],
)
def test_failures_are_told_apart(scripted_server: Start, reply: Reply, message: str) -> None:
    server = scripted_server(lambda seen, index: reply)
    error = fetch(server.url)[0].error
    assert error is not None
    assert re.search(message, error), error


def test_nobody_listens() -> None:
    assert "Connect" in (fetch("http://127.0.0.1:1")[0].error or "")


def test_connections_are_kept_alive_and_headers_sent(scripted_server: Start) -> None:
    server = scripted_server(lambda seen, index: Reply([(0, text_event("a", "stop")), (0, DONE)]))
    records = fetch(server.url + "/prefix/", count=3)
    assert [record.error for record in records] == [None] * 3
    assert {seen.connection for seen in server.seen} == {1}
    assert server.seen[0].headers["authorization"] == "Bearer k"
    assert server.seen[0].path == "/prefix/v1/completions"
    assert server.seen[0].body == {"prompt": "x"}


def test_a_connection_that_the_server_closed_while_idle_is_replaced(scripted_server: Start) -> None:
    server = scripted_server(lambda seen, index: Reply([(0, text_event("a", "stop")), (0, DONE)], close_after=True))
    records = fetch(server.url, count=3)
    assert [record.error for record in records] == [None] * 3
    assert {seen.connection for seen in server.seen} == {1, 2, 3}


def test_a_body_that_ends_with_the_connection(scripted_server: Start) -> None:
    server = scripted_server(lambda seen, index: Reply([(0, text_event("a", "stop")), (0, DONE)], framing="close"))
    records = fetch(server.url, count=2)
    assert [(record.error, record.text) for record in records] == [(None, "a")] * 2


def test_base_url_must_be_http() -> None:
    with pytest.raises(ValueError, match="http://HOST"):
        HttpClient("localhost:8000", {})
