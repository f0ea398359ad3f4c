"""Batches against scripted servers: what is sent, how often, and how many at once."""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import Reply, Script, ScriptedServer, Seen
from tokenmill_engine.errors import ConfigError
from tokenmill_server.batch import target
from tokenmill_server.batch.journal import Journal
from tokenmill_server.batch.run import Totals, run
from tokenmill_server.batch.target import ServerGoneError, target_at

Start = Callable[[Script], ScriptedServer]


def line(custom_id: str, **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": custom_id, **body}}
    return json.dumps(fields).encode() + b"\n"


def reply(text: str, status: int = 200) -> Reply:
    body = {"text": text} if status == 200 else {"error": {"message": text, "code": "some_code"}}
    return Reply([(0, json.dumps(body).encode())], status=status, framing="length")


def echo(seen: Seen, _position: int) -> Reply:
    return reply(seen.body["prompt"])


def answer(url: str, lines: Iterable[bytes], path: Path, concurrency: int = 4, key: str | None = None) -> Totals:
    journal = Journal(path)
    try:
        return run(lines, journal, nullcontext(target_at(url, key)), concurrency, lambda: None)
    finally:
        journal.close()


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_bytes().splitlines()]


def test_every_line_has_one_answer_in_the_order_of_the_input(scripted_server: Start, tmp_path: Path) -> None:
    def script(seen: Seen, _position: int) -> Reply:
        """The first is answered last."""
        if seen.body["prompt"] == "0":
            return Reply([(lambda: len(server.seen) == 40, b'{"text": "0"}')], framing="length")
        return reply(seen.body["prompt"])

    server = scripted_server(script)
    lines = [line(str(index)) for index in range(40)]
    lines[30:30] = [b"\n", b"nonsense\n", line("3"), b"  \n"]
    path = tmp_path / "out"
    assert answer(f"{server.url}/v1/", lines, path, key="k") == Totals(num_lines=42, num_skipped=0)
    answers = written(path)
    assert [each["custom_id"] or each["error"]["line"] for each in answers] == [
        *map(str, range(30)),
        32,
        33,
        *map(str, range(30, 40)),
    ]
    assert all(each["response"]["body"]["text"] == each["custom_id"] for each in answers if each["custom_id"])
    assert "that of line 4 already" in answers[31]["error"]["message"]
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer k"}
    assert len({seen.headers["x-request-id"] for seen in server.seen}) == 40


def test_what_is_answered_is_not_sent_again(scripted_server: Start, tmp_path: Path) -> None:
    server = scripted_server(echo)
    lines = [line(str(index)) for index in range(10)] + [b"bad\n", line("bad", stream=True)]
    path = tmp_path / "out"
    answer(server.url, [lines[4], lines[7], *lines[10:]], path)
    first = path.read_bytes().splitlines()[0]
    # Numbers of lines have changed: what is bad now is told anew, what was told stays.
    assert answer(server.url, lines, path) == Totals(num_lines=12, num_skipped=3)
    assert Counter(seen.body["prompt"] for seen in server.seen) == {str(index): 1 for index in range(10)}
    assert first in path.read_bytes().splitlines()
    whole = path.read_bytes()
    assert answer("http://127.0.0.1:1", lines, path) == Totals(num_lines=12, num_skipped=12)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("concurrency", [1, 3])
def test_requests_at_once_are_bounded(scripted_server: Start, tmp_path: Path, concurrency: int) -> None:
    def script(seen: Seen, position: int) -> Reply:
        return Reply([(lambda: server.max_open >= concurrency, b'{"text": ""}')], framing="length")

    server = scripted_server(script)
    taken = 0

    def lines() -> Iterable[bytes]:
        nonlocal taken
        for index in range(20):
            taken += 1
            yield line(str(index))

    answer(server.url, lines(), tmp_path / "out", concurrency)
    assert server.max_open == concurrency
    assert len({seen.connection for seen in server.seen}) == concurrency
    assert len(written(tmp_path / "out")) == 20


FAULTS = {
    "busy": reply("later", 503),
    "too many": reply("later", 429),
    "dead engine": reply("died", 500),
    "lost": Reply([(0, b'{"te')], drop=True),
    "closed": Reply([(0, b'{"text": "x"}')], framing="length", close_after=True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_server_are_got_over(scripted_server: Start, tmp_path: Path, fault: str) -> None:
    def script(seen: Seen, position: int) -> Reply:
        return FAULTS[fault] if position < 2 else reply("x")

    server = scripted_server(script)
    answer(server.url, [line("a"), line("b")], tmp_path / "out", concurrency=1)
    assert [each["response"]["body"] for each in written(tmp_path / "out")] == [{"text": "x"}] * 2
    assert len(server.seen) == (2 if fault == "closed" else 4)


@pytest.mark.parametrize(
    ("fault", "code", "num_sent"),
    [
        (reply("no such field", 400), "some_code", 1),
        (reply("died", 500), "some_code", 3),
        (reply("too late", 504), "some_code", 1),
        (Reply([(0, b'{"te')], drop=True), "connection_lost", 3),
        (Reply([(0, b"<html>")], framing="length"), "invalid_reply", 1),
    ],
)
def test_faults_that_stay_are_told_and_the_others_go_on(
    scripted_server: Start, tmp_path: Path, fault: Reply, code: str, num_sent: int
) -> None:
    server = scripted_server(lambda seen, _: fault if seen.body["prompt"] == "bad" else reply("x"))
    answer(server.url, [line("bad"), line("good")], tmp_path / "out", concurrency=2)
    bad, good = written(tmp_path / "out")
    assert bad["error"]["code"] == code
    assert good["error"] is None
    assert [seen.body["prompt"] for seen in server.seen].count("bad") == num_sent


def test_a_server_that_is_gone_ends_the_run(
    scripted_server: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "PATIENCE_S", 0.0)
    server = scripted_server(lambda seen, _: reply("later", 503) if seen.body["prompt"] == "2" else echo(seen, 0))
    lines = [line(str(index)) for index in range(5)]
    with pytest.raises(ServerGoneError, match=r"took no request for 0 s \(HTTP 503\)"):
        answer(server.url, lines, tmp_path / "out", concurrency=1)
    assert [each["custom_id"] for each in written(tmp_path / "out")] == ["0", "1"]
    with pytest.raises(ServerGoneError, match=r"127\.0\.0\.1:1 took no request for 0 s \(.*refused"):
        answer("127.0.0.1:1", lines, tmp_path / "out")
    server.script = echo
    assert answer(server.url, lines, tmp_path / "out").num_skipped == 2
    assert [each["custom_id"] for each in written(tmp_path / "out")] == list("01234")


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:99999", "", "http://host:0"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url must be http"):
        target_at(url, None)
