"""`tokenmill complete` as users type it. What it shares with `chat` is tested there."""

import io
from collections.abc import Iterator

import pytest

from tests.support.scripted_server import DONE, Reply, ScriptedServer, Seen, event, text_event
from tokenmill_server.cli import main as cli


def answer(seen: Seen, position: int) -> Reply:
    if seen.path == "/v1/models":
        return Reply([(0, b'{"data": [{"id": "small"}]}')], framing="length")
    if "refuse" in seen.body["prompt"]:
        return Reply([(0, event({"error": {"message": "engine died"}}) + DONE)])
    return Reply([(0, text_event(" a mill")), (0, text_event(".", "stop") + event({"choices": []}) + DONE)])


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(answer)
    yield scripted
    scripted.close()


def test_quick_completes_one_text(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", f"{server.url}/v1", "--api-key", "k", "--max-tokens", "9", "--temperature", "0", "--stats"]
    assert cli.main(["complete", *arguments, "-q", "Once upon"]) == 0
    captured = capsys.readouterr()
    assert captured.out == " a mill.\n"
    assert "pieces/s" in captured.err
    request = server.seen[-1]
    assert request.path == "/v1/completions"
    assert request.headers["authorization"] == "Bearer k"
    assert request.body == {
        "model": "small",
        "prompt": "Once upon",
        "stream": True,
        "max_tokens": 9,
        "temperature": 0.0,
    }


def test_every_line_is_a_text_of_its_own(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\nrefuse\n/new\n/help\ntwo\n/exit\nnever\n"))
    assert cli.main(["complete", "--url", server.url, "--model-name", "m"]) == 0
    assert [seen.body["prompt"] for seen in server.seen] == ["one", "refuse", "two"]
    captured = capsys.readouterr()
    assert captured.err == "error: engine died\n"
    assert captured.out.count(" a mill.\n") == 2
    assert "there is no /new" in captured.out


def test_quick_without_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "--quick", " "]) == 1
    assert "--quick needs a text" in capsys.readouterr().err
