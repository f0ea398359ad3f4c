"""Four API servers in front of two engine cores."""

import psutil
import pytest

from tests.support.server import Server
from tests.support.streams import at_once, read_stream

pytestmark = pytest.mark.slow

PROMPTS = [f"{number} mills ground" for number in range(20)]
LIMIT = 24


@pytest.fixture
def server(scaled_server: Server) -> Server:
    return scaled_server


def test_processes(server: Server) -> None:
    assert len(server.api_server_pids()) == 4
    assert len(server.engine_pids()) == 2
    assert psutil.Process(server.process.pid).cmdline()[0].startswith("tokenmill: launcher")


def test_many_requests_over_everything(server: Server, tiny_server: Server) -> None:
    """Forty at once, half of them streamed, give what one engine gives to each alone; both engines worked."""
    alone = [tiny_server.text(prompt, max_tokens=LIMIT, ignore_eos=True) for prompt in PROMPTS]
    finished = server.metric("request_success_total")
    tokens = server.metric("generation_tokens_total")
    fields = [{"prompt": prompt, "max_tokens": LIMIT, "temperature": 0, "ignore_eos": True} for prompt in PROMPTS]
    whole = at_once([lambda f=f: server.text(**f) for f in fields])  # type: ignore[misc]
    streamed = at_once([lambda f=f: read_stream(server.url, "/v1/completions", f).text() for f in fields])  # type: ignore[misc]
    assert whole == alone
    assert streamed == alone
    assert server.metric("request_success_total") == finished + 40
    assert server.metric("generation_tokens_total") == tokens + 40 * LIMIT
    for engine in ("0", "1"):
        assert server.metric("generation_tokens_total", engine=engine) > 0
    server.check_idle()
    server.check_alive()


def test_a_request_can_be_pinned_to_an_engine_core(server: Server) -> None:
    before = [server.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    body = {"prompt": "a", "max_tokens": 2}
    for _ in range(3):
        response = server.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "1"})
        assert response.status_code == 200
    after = [server.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    assert after == [before[0], before[1] + 3]
    response = server.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": "2"})
    assert response.status_code == 400


@pytest.mark.parametrize("transport", ["header", "field"])
def test_one_client_id_for_several_requests(server: Server, transport: str) -> None:
    """The id is a label: both finish as if alone, over whichever processes they run."""
    limit = 256
    prompts = PROMPTS[:4]
    solo = [server.text(prompt, max_tokens=limit, ignore_eos=True) for prompt in prompts]

    def run(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": limit, "temperature": 0, "ignore_eos": True}
        headers = {"X-Request-Id": "dup"} if transport == "header" else {}
        response = server.http.post(
            "/v1/completions", json=body if transport == "header" else body | {"request_id": "dup"}, headers=headers
        )
        assert response.status_code == 200
        assert response.json()["id"] == "cmpl-dup"
        if transport == "header":
            assert response.headers["x-request-id"] == "dup"
        return str(response.json()["choices"][0]["text"])

    assert at_once([lambda p=p: run(p) for p in prompts]) == solo  # type: ignore[misc]


def test_leaving_one_of_two_requests_with_the_same_id(server: Server) -> None:
    prompt = PROMPTS[5]
    solo = server.text(prompt, max_tokens=600, ignore_eos=True)
    fields = {"prompt": prompt, "max_tokens": 600, "temperature": 0, "ignore_eos": True, "request_id": "dup"}
    results = at_once(
        [
            lambda: read_stream(server.url, "/v1/completions", fields, lambda stream: len(stream.events) < 3).text(),
            lambda: read_stream(server.url, "/v1/completions", fields).text(),
        ]
    )
    assert results[1] == solo
    server.check_idle()
    server.check_alive()
