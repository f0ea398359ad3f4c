"""Requests that are refused before work is done for them, and those whose time is over."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error, post_stream
from tokenmill_engine.messages import FinishReason

PATH = "/v1/completions"
pytestmark = pytest.mark.slow

THREE = {"model": MODEL_NAME, "prompt": "one two three", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    with run_server(max_num_queued_reqs=3, max_num_queued_tokens=8, per_request_metrics=True) as server:
        yield server


def test_the_official_client_tries_again_only_what_may_help(limited: Server) -> None:
    engine = limited.engines[0]
    engine.paused.set()
    openai_client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key="x", max_retries=1)
    with openai_client as official, limited.client() as client, ThreadPoolExecutor(1) as pool:

        def num_tries(n: int) -> float:
            before = rejections(client)["max_num_queued_reqs"]
            with pytest.raises(openai.InternalServerError) as error:
                official.completions.create(model=MODEL_NAME, prompt="x", n=n, max_tokens=1)
            assert (error.value.status_code, error.value.code) == (503, "server_overloaded")
            assert error.value.request_id
            return rejections(client)["max_num_queued_reqs"] - before

        num_added = len(engine.added)
        first = pool.submit(client.post, PATH, json=THREE | {"n": 3, "temperature": 1})
        wait_for(lambda: len(engine.added) == num_added + 3, PATIENCE_S, "open request")
        assert num_tries(n=1) == 2
        engine.paused.clear()
        assert first.result(PATIENCE_S).status_code == 200
        assert num_tries(n=4) == 1


def test_the_official_client_waits_as_long_as_it_is_told(limited: Server) -> None:
    """A second here; by itself it would try again after half of one, less chance."""
    engine = limited.engines[0]
    engine.paused.set()
    answers: list[tuple[float, int]] = []

    def note(response: Any) -> None:
        answers.append((time.monotonic(), response.status_code))
        engine.paused.clear()

    hooks = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    client = openai.OpenAI(base_url=f"{limited.url}/v1", api_key="x", max_retries=1, http_client=hooks)
    with client, limited.client() as other, ThreadPoolExecutor(1) as pool:
        num_added = len(engine.added)
        first = pool.submit(other.post, PATH, json=THREE | {"n": 3, "temperature": 1})
        wait_for(lambda: len(engine.added) == num_added + 3, PATIENCE_S, "open request")
        assert client.completions.create(model=MODEL_NAME, prompt="x", max_tokens=1).choices[0].text
        assert first.result(PATIENCE_S).status_code == 200
    (refused_at, refusal), (answered_at, answer) = answers
    assert (refusal, answer) == (503, 200)
    assert answered_at - refused_at >= 1


def rejections(client: httpx.Client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if "admission_rejections_total{" in line]
    return {line.partition('reason="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize(
    ("waiting", "refused", "reason"),
    [
        ({"prompt": [5], "n": 2, "temperature": 1}, {"prompt": [5, 6], "n": 2, "temperature": 1}, "reqs"),
        ({"prompt": [5] * 5}, {"prompt": [[5, 6], [7, 8]]}, "tokens"),
        ({"prompt": [5], "n": 3, "temperature": 1}, {"prompt": [5]}, "reqs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_too_much_is_open(
    limited: Server, waiting: dict[str, Any], refused: dict[str, Any], reason: str, stream: bool
) -> None:
    """What is refused has reached no engine, and is taken once the others are done."""
    engine = limited.engines[0]
    engine.paused.set()
    with limited.client() as client, ThreadPoolExecutor(1) as pool:
        before, num_added = rejections(client), len(engine.added)
        first = pool.submit(client.post, PATH, json=THREE | waiting)
        num_waiting = waiting.get("n", 1)
        wait_for(lambda: len(engine.added) == num_added + num_waiting, PATIENCE_S, "open request")
        response = client.post(PATH, json=THREE | refused | {"stream": stream})
        assert is_error(response, 503, code="server_overloaded")
        assert response.headers["retry-after"] == "1"
        assert f"--max-num-queued-{reason}" in response.json()["error"]["message"]
        gained = {name: count - before[name] for name, count in rejections(client).items()}
        assert gained == {f"max_num_queued_{each}": float(each == reason) for each in ("reqs", "tokens")}
        assert len(engine.added) == num_added + num_waiting
        engine.paused.clear()
        assert first.result(PATIENCE_S).status_code == 200
        assert client.post(PATH, json=THREE | refused).status_code == 200


def test_more_than_will_ever_be_taken(limited: Server) -> None:
    with limited.client() as client:
        response = client.post(PATH, json=THREE | {"n": 4, "temperature": 1})
        assert is_error(response, 503, code="server_overloaded")
        assert response.headers["x-should-retry"] == "false"
        assert client.post(PATH, json=THREE | {"prompt": [5] * 9}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_is_over_before_the_answer_begins(server: Server, stream: bool) -> None:
    engine = server.engines[0]
    engine.paused.set()
    with server.client() as client:
        num_aborted = len(engine.aborted)
        response = client.post(PATH, json=THREE | {"stream": stream}, headers={"X-Request-Timeout-Ms": "50"})
        assert is_error(response, 503, code="server_overloaded")
        assert "X-Request-Timeout-Ms" in response.json()["error"]["message"]
        assert response.headers["retry-after"] == "1"
        wait_for(lambda: engine.aborted[num_aborted:] != [], PATIENCE_S, "an abort")
        assert engine.aborted[-1][1] is FinishReason.ABORT
        engine.paused.clear()
        in_time = client.post(PATH, json=THREE, headers={"X-Request-Timeout-Ms": "600000"})
        assert in_time.json()["choices"][0]["finish_reason"] == "length"


def test_the_time_is_over_in_the_middle_of_an_answer(server: Server) -> None:
    engine = server.engines[0]
    engine.step_s = 0.02
    endless = THREE | {"max_tokens": 8000}
    # Enough for the first token, however busy the machine is; too little for 8000 steps.
    headers = {"X-Request-Timeout-Ms": "3000"}
    with server.client() as client:
        with client.stream("POST", PATH, json=endless | {"stream": True}, headers=headers) as response:
            lines = [line for line in response.iter_lines() if line]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert lines[-1] == "data: [DONE]"
        whole = client.post(PATH, json=endless, headers={"X-Request-Timeout-Ms": "3000"})
        assert is_error(whole, 504, code="deadline_exceeded")
        assert whole.headers["x-should-retry"] == "false"
    wait_for(lambda: engine.num_running == 0, PATIENCE_S, "an idle engine")
    engine.step_s = 0.0


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1.5", "99999999999999"])
def test_times_that_are_none(client: httpx.Client, value: str) -> None:
    response = client.post(PATH, json=THREE, headers={"X-Request-Timeout-Ms": value})
    assert is_error(response, 400, "X-Request-Timeout-Ms")


def test_fields_without_effect_are_refused_if_told_so() -> None:
    with run_server(strict_fields=True) as server, server.client() as client:
        response = client.post(PATH, json=THREE | {"user": "me", "wibble": 1})
        assert is_error(response, 400, "user", "unsupported_parameter")
        assert "'user', 'wibble'" in response.json()["error"]["message"]
        part = {"type": "text", "text": "x", "cache_control": {}}
        chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        response = client.post("/v1/chat/completions", json=chat)
        assert is_error(response, 400, "messages[0].content[0].cache_control", "unsupported_parameter")
        assert client.post(PATH, json=THREE | {"user": None, "best_of": 1, "suffix": None}).status_code == 200
        assert is_error(client.post("/tokenize", json={"prompt": "x", "user": "me"}), 400, "user")


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_times_of_an_answer(limited: Server, client: httpx.Client, path: str) -> None:
    """In the reply, in the last chunk of a stream, or in the chunk with the usage; only where they were asked for."""
    body: dict[str, Any] = {"prompt": [5], "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    body["ignore_eos"] = True
    with limited.client() as asked:
        whole = asked.post(path, json=body).json()
        stream = post_stream(asked, path, body)
        with_usage = post_stream(asked, path, body | {"stream_options": {"include_usage": True}})
        several = asked.post(path, json=body | {"n": 2}).json()
    for metrics in (whole["metrics"], stream.chunks[-1]["metrics"], with_usage.chunks[-1]["metrics"]):
        assert metrics["queue_time_ms"] + metrics["prefill_time_ms"] == pytest.approx(metrics["time_to_first_token_ms"])
        assert metrics["generation_time_ms"] == pytest.approx(3 * metrics["mean_itl_ms"])
        assert metrics["num_preemptions"] == 0
    assert all("metrics" not in chunk for chunk in (*stream.chunks[:-1], *with_usage.chunks[:-1]))
    assert "metrics" not in several
    assert "metrics" not in client.post(path, json=body).json()
