"""Images that are known, in chats before an engine that has what it was sent and echoes: what reaches it, and what
clients are told."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.media_api import qwen
from tests.support.pictures import data_url, encoded, noise, picture_url
from tests.support.sse import is_error, post_stream
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.media_store import MediaStore
from tokenmill_engine.messages import AddRequest
from tokenmill_server.multimodal.settings import GIB, MediaSettings

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
SMALL = 3 * 17_000
"""Bytes for about three images of 50 x 50 pixels."""


def counted_qwen() -> EngineConfig:
    config = qwen()
    namespaces = dataclasses.replace(config.observability, metrics_namespaces=("vllm",))
    return dataclasses.replace(config, observability=namespaces)


def serving(cache_bytes: int, num_engines: int = 1, **options: Any) -> Any:
    engine_options = {"max_model_len": 1024, "media": MediaStore(cache_bytes if num_engines == 1 else 0)}
    media = MediaSettings(cache_gb=cache_bytes / GIB, loading_threads=2)
    return run_server(num_engines, engine=counted_qwen(), engine_options=engine_options, media=media, **options)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(1 << 24) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def image(url: str | None, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": None if url is None else {"url": url}, **fields}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 2, **fields}


def ask(client: httpx.Client, *parts: Any, **fields: Any) -> None:
    response = client.post(PATH, json=chat(*parts, **fields))
    assert response.status_code == 200, response.text


def travelled(requests: list[AddRequest]) -> list[list[bool]]:
    """Of each image of each request, whether its tensors came along."""
    return [[bool(item.tensors) for item in request.media] for request in requests]


def lookups(client: httpx.Client) -> tuple[float, float]:
    """(hits, queries) that /metrics has."""
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if "mm_cache" in sample.name
    }
    assert set(found) >= {"vllm:mm_cache_hits_total", "vllm:mm_cache_queries_total"}
    return found["vllm:mm_cache_hits_total"], found["vllm:mm_cache_queries_total"]


def test_a_conversation_sends_each_image_once(client: httpx.Client, server: Server) -> None:
    pictures = [image(picture_url(20, 30, seed)) for seed in range(4)]
    for turn in range(4):
        ask(client, *pictures[: turn + 1], "and?")
    assert travelled(server.engines[0].added) == [[False] * turn + [True] for turn in range(4)]
    assert lookups(client) == (6, 10)
    assert server.engines[0].num_missing == 0


def test_choices_share_what_the_first_carries(client: httpx.Client, server: Server) -> None:
    ask(client, image(picture_url(20, 30)), n=5, temperature=1, max_tokens=20)
    assert travelled(server.engines[0].added) == [[True]] + [[False]] * 4
    assert lookups(client) == (0, 1)


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("cache_bytes", [0, SMALL, 1 << 24])
def test_a_refused_request_is_no_half_entry(num_engines: int, cache_bytes: int) -> None:
    """Too long with its image, or refused by the engine itself: then it is sent again, once it is asked for."""
    with serving(cache_bytes, num_engines) as server, server.client() as client:
        picture = image(picture_url(50, 50))
        for body in (
            chat(picture, "b " * 1000),
            chat(picture, "b " * 30, max_tokens=5000),
            chat(picture, image("data:,x")),
            chat(picture, "b", truncate_prompt_tokens=5),
            chat(picture, "b", min_tokens=1000),
        ):
            assert is_error(client.post(PATH, json=body), 400)
        assert all(engine.added == [] for engine in server.engines)
        for _ in range(2):
            ask(client, picture, "short")
        for seed in range(1, 9):
            ask(client, image(picture_url(50, 50, seed)), "others")
        ask(client, picture, "short")
        assert (lookups(client) == (0, 0)) == (cache_bytes == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_uuids(client: httpx.Client, server: Server, stream: bool) -> None:
    url = picture_url(20, 30)
    named = chat(image(None, uuid="cat"), "b", stream=stream)
    response = client.post(PATH, json=named)
    assert is_error(response, 400, "messages[0].content[0].uuid"), response.text
    assert "not sent before" in response.json()["error"]["message"]
    ask(client, image(url, uuid="cat"), "b")
    if stream:
        assert post_stream(client, PATH, named).text(0)
    else:
        assert client.post(PATH, json=named).status_code == 200
    first, second = server.engines[0].added
    assert travelled([first, second]) == [[True], [False]]
    assert first.media[0].key == second.media[0].key
    assert first.prompt_token_ids == second.prompt_token_ids
    for headers, salt in (({"Authorization": "Bearer other"}, None), ({}, "salt")):
        others = client.post(PATH, json={**named, "cache_salt": salt}, headers=headers)
        assert is_error(others, 400, "messages[0].content[0].uuid"), others.text
    # The engine has lost it: who sends the image along does not notice, who does not is told.
    server.engines[0].media = MediaStore(1 << 24)
    lost = client.post(PATH, json=named)
    assert is_error(lost, 400, "messages[0].content[0].uuid"), lost.text
    assert "send the media themselves along" in lost.json()["error"]["message"]
    ask(client, image(url, uuid="cat"), "b")
    assert travelled(server.engines[0].added[2:]) == [[True]]
    assert client.post(PATH, json=named).status_code == 200


def test_an_engine_that_has_forgotten_everything(client: httpx.Client, server: Server) -> None:
    """While many ask for the same images."""
    pictures = [image(picture_url(20, 30, seed)) for seed in range(3)]
    ask(client, *pictures, "before")
    server.engines[0].media = MediaStore(0)
    server.engines[0].added.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: ask(client, *pictures, f"number {number}", n=2, temperature=1), range(16)))
    added = server.engines[0].added
    assert len(added) == 32
    assert server.engines[0].num_missing > 0
    assert lookups(client)[1] == 3 + 16 * 3


def test_same_bytes_of_another_shape(client: httpx.Client, server: Server) -> None:
    pixels = noise(120, 80, 3)
    for _ in range(2):
        for shown in (pixels, pixels.reshape(80, 120, 3)):
            ask(client, image(data_url(encoded(shown))), "what?")
    first, second, *again = server.engines[0].added
    assert first.media[0].key != second.media[0].key
    assert (first.media[0].grid, second.media[0].grid) == tuple(request.media[0].grid for request in again)
    assert [request.media[0].key for request in again] == [first.media[0].key, second.media[0].key]
    assert np.prod(first.media[0].grid or 0) == 4 * first.media[0].num_tokens


def test_counters_are_those_of_all_api_servers() -> None:
    """Whichever answers."""
    with serving(1 << 24, num_engines=2, api_server_count=2) as server:
        for number in range(8):  # a new connection may end at either
            with server.client() as client:
                ask(client, image(picture_url(20, 30)), f"number {number}")
        seen = set()
        for _ in range(6):
            with server.client() as client:
                seen.add(lookups(client))
        assert len(seen) == 1
        hits, queries = seen.pop()
        assert queries == 8
        assert hits in (6, 7)
