"""Flags about connections, the log, routes for operators, and code of the server's owner."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.api_server import Server, run_server
from tests.support.certificates import make_certificate, sign_again
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error, post_stream

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
BODY = {"prompt": "one two three", "max_tokens": 4, "temperature": 0}
OWN_CODE = """
class Loud:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def loud(message):
            if message["type"] == "http.response.body":
                message = message | {"body": message["body"].replace(b"two", b"TWO")}
            await send(message)
        await self.app(scope, receive, loud)

async def sign(request, call_next):
    response = await call_next(request)
    response.headers["x-signed"] = request.scope["state"]["request_id"]
    return response
"""

RENEWING_CODE = """
from pathlib import Path

class Renewing:
    def __init__(self, app):
        Path("{old}").write_bytes(Path("{new}").read_bytes())
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)
"""


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With everything set; two API servers."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_code.py").write_text(OWN_CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with run_server(
            api_server_count=2,
            max_headers=20,
            max_head_bytes=2048,
            load_tracking=True,
            tokenizer_info=True,
            fingerprint_mode="custom",
            fingerprint_value="mine",
            middleware=("own_code.Loud", "own_code.sign"),
        ) as server:
            yield server


def test_limits_of_heads(owned: Server, client: httpx.Client) -> None:
    many = {f"x-{index}": "1" for index in range(20)}
    long = {"x-long": "1" * 2048}
    with owned.client() as limited:
        for headers in (many, long):
            refused = limited.get("/version", headers=headers)
            assert is_error(refused, 431, code="headers_too_large")
            assert "20 headers and 2048 bytes" in refused.json()["error"]["message"]
        assert limited.get("/version").status_code == 200
    assert all(client.get("/version", headers=headers).status_code == 200 for headers in (many, long))


def test_load_of_all_api_servers(owned: Server, client: httpx.Client) -> None:
    engine = owned.engines[0]

    def loads() -> set[int]:
        """As different connections see it, which are accepted by different API servers."""
        seen = set()
        for _ in range(4):
            with owned.client() as asking:
                seen.add(asking.get("/load").json()["server_load"])
        return seen

    engine.step_s = 0.01
    with owned.client() as busy:
        endless = BODY | {"max_tokens": 8000, "stream": True, "n": 2, "temperature": 1, "ignore_eos": True}
        with busy.stream("POST", PATH, json=endless) as response:
            lines = response.iter_lines()  # which ends the request once nobody refers to it
            next(lines)
            assert loads() == {2}
            next(lines)
    wait_for(lambda: loads() == {0}, PATIENCE_S, "nothing to be open")
    engine.step_s = 0.0
    assert is_error(client.get("/load"), 404)


def test_the_tokenizer(owned: Server, client: httpx.Client) -> None:
    with owned.client() as asking:
        facts = asking.get("/tokenizer_info").json()
    assert facts["eos_token"] == "<|im_end|>"
    assert "messages" in facts["chat_template"]
    assert is_error(client.get("/tokenizer_info"), 404)


def test_the_fingerprint(owned: Server, client: httpx.Client) -> None:
    with owned.client() as asking:
        assert asking.post(PATH, json=BODY).json()["system_fingerprint"] == "mine"
    assert client.post(PATH, json=BODY).json()["system_fingerprint"].startswith("tokenmill-")


def test_code_of_the_owner(owned: Server, client: httpx.Client) -> None:
    """It sees all of an answer, piece by piece if it is streamed."""
    with owned.client() as asking:
        whole = asking.post(PATH, json=BODY)
        assert "TWO" in whole.json()["choices"][0]["text"]
        assert whole.headers["x-signed"] == whole.headers["x-request-id"]
        assert "TWO" in post_stream(asking, PATH, BODY).text()
    plain = client.post(PATH, json=BODY)
    assert "x-signed" not in plain.headers
    assert "TWO" not in plain.text


def test_lines_of_the_log_that_quote_texts(capfd: pytest.CaptureFixture[str]) -> None:
    logged = ""

    def has_line_of(request_id: str) -> bool:
        nonlocal logged
        logged += capfd.readouterr().err
        return f"{request_id}: POST" in logged

    wishes = {"log_requests": True, "log_outputs": True, "max_log_len": 7, "unlogged_paths": ("/tokenize",)}
    with run_server(**wishes) as server, server.client() as client:
        client.post("/tokenize", json={"prompt": "x"}, headers={"X-Request-Id": "unlogged"})
        for stream in (False, True):
            name = f"quoted-{stream}"
            client.post(PATH, json=BODY | {"stream": stream}, headers={"X-Request-Id": name})
            wait_for(lambda name=name: has_line_of(name), PATIENCE_S, "line in the log")  # type: ignore[misc]
            line = next(line for line in logged.splitlines() if f"{name}: POST" in line)
            assert line.endswith("(length); prompt 'one two'...; output 'one two'...")
        client.post(PATH, json=BODY | {"prompt": [504, 505]}, headers={"X-Request-Id": "ids"})
        wait_for(lambda: has_line_of("ids"), PATIENCE_S, "line in the log")
        assert "; prompt '[504, 5'...; output " in logged
    assert "unlogged" not in logged


def test_certificates_are_renewed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also those that were while the server started, and by way of files that do not go together for a while."""
    certificate, key = map(Path, make_certificate(tmp_path))
    renewed, newest, newest_key = (tmp_path / "renewed.pem", *map(Path, make_certificate(tmp_path, "newest")))
    sign_again(key, renewed)
    (tmp_path / "renewing_code.py").write_text(RENEWING_CODE.format(old=str(certificate), new=str(renewed)))
    logged = ""

    def num_refused() -> int:
        nonlocal logged
        logged += capfd.readouterr().err
        return logged.count("the certificate has changed and cannot be used")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
        files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
        with run_server(**files, ssl_refresh=True, middleware=("renewing_code.Renewing",)) as server:

            def shows(expected: Path) -> bool:
                return ssl.get_server_certificate(("127.0.0.1", server.port)).strip() == expected.read_text().strip()

            wait_for(lambda: shows(renewed), PATIENCE_S, "the certificate that was renewed during the start")
            certificate.write_bytes(newest.read_bytes())
            wait_for(lambda: num_refused() == 1, PATIENCE_S, "a certificate without its key to be refused")
            assert shows(renewed)
            key.write_bytes(newest_key.read_bytes())
            wait_for(lambda: shows(newest), PATIENCE_S, "the new certificate")
            key.write_bytes(b"")
            wait_for(lambda: num_refused() == 2, PATIENCE_S, "an empty key to be refused")
            assert shows(newest)
