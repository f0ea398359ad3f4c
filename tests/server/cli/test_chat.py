import io
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.scripted_server import DONE, Reply, Script, ScriptedServer, Seen, event
from tests.support.server import wait_for
from tokenmill_server.cli import main as cli


def delta(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


def answer(seen: Seen, position: int) -> Reply:
    if seen.path == "/v1/models":
        return Reply([(0, b'{"data": [{"id": "small"}]}')], framing="length")
    return Reply(
        [
            (0, event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}) + delta("Hel")),
            (0.02, delta("lo") + b": keep-alive\n\n" + DONE),
        ]
    )


Start = Callable[[Script], ScriptedServer]


@pytest.fixture
def start() -> Iterator[Start]:
    servers: list[ScriptedServer] = []

    def begin(script: Script) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_quick_asks_the_first_model(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(answer)
    arguments = ["--url", f"{server.url}/v1/", "--api-key", "k", "--system-prompt", "Be brief.", "--max-tokens", "9"]
    assert cli.main(["chat", *arguments, "--stats", "-q", "Hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello\n"
    assert "pieces/s" in captured.err
    request = server.seen[-1]
    assert request.headers["authorization"] == "Bearer k"
    assert request.body == {
        "model": "small",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "stream": True,
        "max_tokens": 9,
    }


def test_conversation_keeps_what_was_said(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/new\nthree\n"))
    assert cli.main(["chat", "--url", f"{server.url}/v1", "--model-name", "m"]) == 0
    asked = [[message["content"] for message in seen.body["messages"]] for seen in server.seen]
    assert asked == [["one"], ["one", "Hello", "two"], ["three"]]
    assert capsys.readouterr().out.count("Hello") == 3


def test_a_refusal_is_shown_and_the_conversation_goes_on(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Reply([(0, b'{"error": {"message": "too long"}}')], status=400, framing="length")
    server = start(lambda seen, position: refusal if position == 0 else answer(seen, position))
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert cli.main(["chat", "--url", f"{server.url}/v1", "--model-name", "m"]) == 0
    captured = capsys.readouterr()
    assert "answered 400: too long" in captured.err
    assert [message["content"] for message in server.seen[1].body["messages"]] == ["two"]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply([(0, b"nope")], status=502, framing="length"), "answered 502: nope"),
        (Reply([(0, event({"error": {"message": "engine died"}}) + DONE)]), "engine died"),
        (Reply([(0, delta("Hel"))]), "closed the stream before its end"),
        (Reply([(0, delta("Hel"))], drop=True), "closed the stream before its end"),
        (Reply([(0, event({"no": "choices"}))]), "no part of an answer"),
        (Reply([(0, b"data: {\n\n")]), "no part of an answer"),
    ],
)
def test_failures_are_one_line(start: Start, capsys: pytest.CaptureFixture[str], reply: Reply, message: str) -> None:
    server = start(lambda seen, position: reply)
    assert cli.main(["chat", "--url", f"{server.url}/v1", "--model-name", "m", "--quick", "Hi"]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def wait_until_read(connection: socket.socket) -> None:
    """Until the other end, on this machine, has taken everything that was sent, as the kernel tells."""
    near, far = connection.getsockname()[1], connection.getpeername()[1]

    def is_read() -> bool:
        queues = {}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, _, queued, *_ = line.split()
            ports = tuple(int(address.rpartition(":")[2], 16) for address in (local, remote))
            queues[ports] = [int(size, 16) for size in queued.split(":")]
        return queues[near, far][0] == queues[far, near][1] == 0

    wait_for(is_read, 60, "reader")


@pytest.mark.parametrize("ending", ["reset", "silence"])
def test_connections_that_end_badly_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Before the answer begins and in the middle of it; by a reset, and by silence."""
    monkeypatch.setattr("tokenmill_server.cli.api_client._CONNECT_TIMEOUT_S", 1.0 if ending == "silence" else 60.0)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for sent, message in ((b"", "no server answers"), (head, "broke in the middle of the answer")):
        over = threading.Event()
        with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

            def serve(listener: socket.socket = listener, sent: bytes = sent, over: threading.Event = over) -> None:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(sent)
                    if ending == "silence":
                        over.wait(60)
                    else:
                        wait_until_read(connection)  # or the reset overtakes it
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

            served = pool.submit(serve)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
            assert cli.main(["chat", "--url", url, "--model-name", "m", "--quick", "Hi"]) == 1
            over.set()
            served.result()
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    "form", ["{host}:{port}", "http://{host}:{port}", "http://{host}:{port}/", "{host}:{port}/v1/"]
)
def test_urls_as_people_write_them(start: Start, capsys: pytest.CaptureFixture[str], form: str) -> None:
    server = start(answer)
    port = server.url.rpartition(":")[2]
    assert cli.main(["chat", "--url", form.format(host="127.0.0.1", port=port), "-q", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert cli.main(["chat", "--host", "127.0.0.1", "--port", port, "-q", "Hi"]) == 0
    assert [seen.path for seen in server.seen] == ["/v1/models", "/v1/chat/completions"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "127.0.0.1:9", "--port", "9"], "--url contradicts --host and --port"),
        (["--quick", " "], "--quick needs a text"),
        (["--host", "::1", "--port", "9"], "no server answers at http://[::1]:9/v1/models"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["chat", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_commands_of_a_conversation(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/clear all\n /clear\n/usr/bin?\n/exit\nnever\n"))
    assert cli.main(["chat", "--url", server.url, "--model-name", "m"]) == 0
    assert [seen.body["messages"][-1]["content"] for seen in server.seen] == [" /clear", "/usr/bin?"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("> /new starts over, /help lists the commands")
    assert lines[2].startswith("> there is no /clear all; a question may begin with a space. /new starts over")


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", "--url", "http://127.0.0.1:9/v1", "-q", "Hi"]) == 1
    assert "no server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err
