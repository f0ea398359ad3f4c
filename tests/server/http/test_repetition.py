"""Texts that go round in circles end, if the request wants that."""

from typing import Any

import httpx
import pytest

from tests.support.api_server import Server
from tests.support.server import PATIENCE_S, wait_for
from tests.support.sse import post_stream
from tokenmill_engine.messages import FinishReason

PATH = "/v1/completions"
CIRCLE = {"prompt": [504, 505, 506], "temperature": 0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": "nothing"}])
def test_a_text_that_repeats_itself_ends(
    client: httpx.Client, server: Server, fields: dict[str, Any], stream: bool
) -> None:
    """The engine repeats the prompt of three tokens; it is told why it may stop."""
    engine = server.engines[0]
    num_aborted = len(engine.aborted)
    body = CIRCLE | {"max_tokens": 8000, "return_token_ids": True} | fields
    body["repetition_detection"] = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    if stream:
        choices = post_stream(client, PATH, body).choices()
        token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", [])]
    else:
        choices = client.post(PATH, json=body).json()["choices"]
        token_ids = choices[0]["token_ids"]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("repetition", None)
    assert token_ids == [504, 505, 506] * 3
    wait_for(lambda: len(engine.aborted) == num_aborted + 1, PATIENCE_S, "word to the engine")
    assert engine.aborted[-1][1] is FinishReason.REPETITION


def test_repetitions_that_are_too_few_or_too_early(client: httpx.Client) -> None:
    body = CIRCLE | {"max_tokens": 12}
    for detection, fields, num_tokens in (
        ({"max_pattern_size": 2, "min_count": 3}, {}, 12),
        ({"max_pattern_size": 3, "min_count": 5}, {}, 12),
        ({"max_pattern_size": 0}, {}, 12),
        ({"max_pattern_size": 3}, {}, 6),
        ({"max_pattern_size": 3}, {"min_tokens": 8}, 8),
    ):
        reply = client.post(PATH, json=body | {"repetition_detection": detection} | fields).json()
        assert reply["usage"]["completion_tokens"] == num_tokens
