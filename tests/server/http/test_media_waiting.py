"""Requests that wait with their images for an engine, or for their images: not too many, and not for too long."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from tests.support.api_server import run_server
from tests.support.media_api import qwen
from tests.support.media_host import media_host
from tests.support.pictures import data_url, encoded, noise
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error
from tokenmill_server.deadlines import TIMEOUT_HEADER
from tokenmill_server.multimodal.settings import MediaSettings

PATH = "/v1/chat/completions"
URL = data_url(encoded(noise(40, 60), "BMP") + bytes(100_000))


def test_a_request_whose_time_is_over_waits_for_no_image() -> None:
    """What was fetched for it is given up."""
    media = MediaSettings(allowed_domains=("localhost",), fetch_timeout_s=PATIENCE_S, loading_threads=1)
    gone = threading.Event()

    def silent(connection: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            connection.recv(1)
        gone.set()

    with (
        media_host(slow=silent) as host,
        run_server(engine=qwen(), engine_options={"max_model_len": 1024}, media=media) as server,
        server.client() as client,
    ):
        part = {"type": "image_url", "image_url": {"url": host.url("/slow")}}
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        late = client.post(PATH, json=body, headers={TIMEOUT_HEADER: "500"})
        assert is_error(late, 503, code="server_overloaded")
        assert "before the answer began" in late.json()["error"]["message"]
        wait_for(lambda: gone.is_set() or not host.paths, PATIENCE_S, "the end of the connection to the host")
        assert server.engines[0].added == []


def test_a_request_beyond_the_limit_is_told_to_come_again() -> None:
    """And has its answer once others have theirs."""
    media = MediaSettings(memory_bytes=3 * len(URL), loading_threads=1)
    part = {"type": "image_url", "image_url": {"url": URL}}
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    with (
        run_server(engine=qwen(), engine_options={"max_model_len": 1024}, media=media) as server,
        server.client() as client,
        server.client() as other,
        ThreadPoolExecutor(2) as threads,
    ):
        (engine,) = server.engines
        engine.paused.set()
        try:
            waiting = []
            for number in range(2):
                waiting.append(threads.submit((client, other)[number].post, PATH, json=body))
                wait_for(lambda: len(engine.added) == len(waiting), PATIENCE_S, "the request")
            with server.client() as late:
                refused = late.post(PATH, json=body)
                assert is_error(refused, 503, code="server_overloaded")
                assert refused.headers["retry-after"] == "1"
                assert "--max-media-memory" in refused.json()["error"]["message"]
        finally:
            engine.paused.clear()
        assert [each.result(PATIENCE_S).status_code for each in waiting] == [200, 200]
        assert client.post(PATH, json=body).status_code == 200
