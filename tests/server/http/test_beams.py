"""Beam search over HTTP: what it is refused with, and what its answers look like."""

from typing import Any

import httpx
import pytest

from tests.support.api_server import Server
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import is_error

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
BEAMS: dict[str, Any] = {
    "prompt": "one two three",
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 3,
    "n": 2,
    "use_beam_search": True,
}


@pytest.mark.parametrize("path", [PATH, CHAT])
def test_choices_are_beams(client: httpx.Client, server: Server, path: str) -> None:
    """One request of one token for each beam and step."""
    num_added = len(server.engines[0].added)
    reply = client.post(path, json=BEAMS | {"return_token_ids": True, "temperature": 0, "ignore_eos": True}).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 2
    ids = [choice["token_ids"] for choice in reply["choices"]]
    assert len({tuple(each) for each in ids}) == 2
    assert reply["usage"]["completion_tokens"] == 6
    added = server.engines[0].added[num_added:]
    assert [request.sampling.max_tokens for request in added] == [1] * 5


def test_several_prompts_and_end_tokens(client: httpx.Client) -> None:
    """The engine thinks that token t is followed by t, t + 1, ... with probabilities that it makes up."""
    body = BEAMS | {"prompt": [[500], [600]], "return_token_ids": True, "stop_token_ids": [501]}
    reply = client.post(PATH, json=body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    ended = [choice for choice in reply["choices"] if choice["finish_reason"] == "stop"]
    assert all(choice["stop_reason"] == 501 == choice["token_ids"][-1] for choice in ended)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"top_p": 0.5}, "top_p"),
        ({"temperature": 0.7}, "temperature"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"seed": 1}, "seed"),
        ({"n": 65}, "n"),
        ({"length_penalty": 101}, "length_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
    ],
)
def test_what_does_not_go_together(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert is_error(client.post(CHAT, json=BEAMS | fields), 400, param)


def test_log_probabilities_of_the_tokens_alone_are_some_too(client: httpx.Client) -> None:
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 2}
    assert is_error(client.post("/v1/completions", json=body | {"logprobs": 0}), 400, "logprobs")


def test_values_that_ask_for_nothing_are_fine(client: httpx.Client) -> None:
    neutral = {"top_p": 1, "top_k": -1, "stream": False, "stop": [], "seed": None, "logprobs": False}
    assert client.post(CHAT, json=BEAMS | neutral | {"response_format": {"type": "text"}}).status_code == 200


def test_a_client_that_waits_no_longer_stops_the_search(server: Server) -> None:
    engine = server.engines[0]
    engine.step_s = 0.01
    with server.client() as client:
        response = client.post(PATH, json=BEAMS | {"max_tokens": 5000}, headers={"X-Request-Timeout-Ms": "3000"})
    assert is_error(response, 504, code="deadline_exceeded")
    wait_for(lambda: engine.num_running == 0, PATIENCE_S, "an idle engine")
    engine.step_s = 0.0
