import io
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenmill_engine.errors import ConfigError, EngineError
from tokenmill_server.batch.files import count_lines, open_input, open_output
from tokenmill_server.batch.lines import BadLineError, unsent


@dataclass
class Store:
    """What a store of files holds, by path, and how many of the next uploads it refuses."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    num_refusals: int = 0


@pytest.fixture
def store() -> Iterator[Store]:
    held = Store()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = held.files.get(self.path)
            self._answer(404 if data is None else 200, data or b"")

        def do_PUT(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            held.num_refusals -= 1
            if held.num_refusals >= 0:
                return self._answer(503)
            held.files[self.path] = data
            return self._answer(200)

        def _answer(self, status: int, data: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Nowhere."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        held.url = f"http://127.0.0.1:{server.server_port}"
        yield held
        server.shutdown()
        thread.join()


ANSWER = unsent(1, BadLineError("bad", "a"))


def test_input_from_files_addresses_and_standard_input(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "one é\n\ntwo".encode()
    file = tmp_path / "in put.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + data)
    store.files["/in?signature=1"] = data
    for place in (str(file), file.as_uri(), f"{store.url}/in?signature=1"):
        with open_input(place) as lines:
            assert count_lines(lines) == 2
            assert list(lines) == ["one é\n".encode(), b"\n", b"two"]
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    with open_input("-") as lines:
        assert len(list(lines)) == 3


def test_lines_that_can_be_read_once_are_not_counted() -> None:
    readable, writable = os.pipe()
    os.close(writable)
    with open(readable, "rb") as pipe:
        assert count_lines(pipe) is None


def test_input_that_is_not_there(tmp_path: Path, store: Store) -> None:
    for place, message in (
        (str(tmp_path / "none"), "No such file"),
        (str(tmp_path), "Is a directory"),
        (f"{store.url}/none?secret", r"/none: HTTP 404"),
        ("http://127.0.0.1:1/", "refused"),
    ):
        with pytest.raises(ConfigError, match=message) as caught, open_input(place):
            raise AssertionError
        assert "secret" not in str(caught.value)


def test_output_to_an_address_is_kept_until_it_is_taken(tmp_path: Path, store: Store) -> None:
    folder = tmp_path / "kept"
    store.num_refusals = 7
    message = r"/out did not take the answers \(HTTP 503\), which are in"
    with (
        pytest.raises(EngineError, match=message) as caught,
        open_output(f"{store.url}/out?signature=1", folder) as output,
    ):
        output.append(ANSWER)
    (kept,) = folder.iterdir()
    assert str(kept) in str(caught.value)
    assert "signature" not in str(caught.value)
    with open_output(f"{store.url}/out?signature=2", folder) as output:
        assert "a" in output
    ((path, data),) = store.files.items()
    assert path == "/out?signature=2"
    assert json.loads(data)["custom_id"] == "a"
    assert list(folder.iterdir()) == []


def test_what_fails_before_the_end_is_not_sent(tmp_path: Path, store: Store) -> None:
    def fail() -> None:
        with open_output(f"{store.url}/out", tmp_path) as output:
            output.append(ANSWER)
            raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        fail()
    assert store.files == {}
    with open_output(f"{store.url}/out", tmp_path) as output:
        assert len(output) == 1


def test_output_to_a_file_and_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.BytesIO()
    monkeypatch.setattr("sys.stdout", SimpleNamespace(buffer=stdout))
    path = tmp_path / "out"
    for place in (str(path), "-"):
        with open_output(place) as output:
            output.append(ANSWER)
    assert stdout.getvalue() == path.read_bytes()
    assert not stdout.closed
