"""Images in chats, in front of an engine that only echoes: what reaches it, and what is refused before."""

import dataclasses
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from transformers import Qwen2VLImageProcessorPil

from tests.support.api_server import MODEL_NAME, Server, run_server
from tests.support.media_api import qwen
from tests.support.media_host import MediaHost, answer, media_host, redirect
from tests.support.media_items import seen_values
from tests.support.pictures import data_url, encoded, noise, picture_url
from tests.support.sse import is_error, post_stream
from tests.support.tiny_media_models import ADDED_TOKENS, IMAGE_PAD, cached_tiny_media_model
from tokenmill_engine.messages import AddRequest
from tokenmill_server.multimodal.settings import MediaSettings, PromptLimits
from tokenmill_server.processing.tokenizer import load_tokenizer

PATH = "/v1/chat/completions"
PAD = ADDED_TOKENS[IMAGE_PAD]


@pytest.fixture(scope="module")
def host() -> Iterator[MediaHost]:
    with media_host(picture=answer(encoded(noise(20, 30)))) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    (path / "x.png").write_bytes(encoded(noise(20, 30)))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    media = MediaSettings(
        limits=PromptLimits(images=3),
        allowed_domains=("localhost",),
        local_path=str(folder),
        max_bytes=2_000_000,
        max_pixels=1_000_000,
        fetch_timeout_s=60.0,
        loading_threads=2,
    )
    with run_server(engine=qwen(), engine_options={"max_model_len": 1024}, media=media) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def image(url: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    messages = [{"role": "user", "content": content}]
    return {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 2, **fields}


def sent(server: Server) -> tuple[AddRequest, list[int]]:
    """The last request that the engine got, and its prompt."""
    request = server.engines[0].added[-1]
    return request, np.frombuffer(request.prompt_token_ids, "<i4").tolist()


def test_what_reaches_the_engine(client: httpx.Client, server: Server) -> None:
    response = client.post(PATH, json=chat("a", image(picture_url(20, 30)), "b", image(picture_url(48, 16, 7)), "c"))
    assert response.status_code == 200, response.text
    request, prompt = sent(server)
    first, second = request.media
    oracle = Qwen2VLImageProcessorPil.from_pretrained(str(cached_tiny_media_model("qwen2_vl")))
    for item, pixels in ((first, noise(20, 30)), (second, noise(48, 16, 7))):
        wanted = oracle(pixels, return_tensors="np", input_data_format="channels_last")
        np.testing.assert_array_equal(seen_values(item.tensors, times=2), wanted["pixel_values"])
        assert item.grid == tuple(wanted["image_grid_thw"][0])
        assert prompt[item.offset : item.offset + item.num_tokens] == [PAD] * item.num_tokens
        assert prompt[item.offset - 1] != PAD != prompt[item.offset + item.num_tokens]
    tokenizer = load_tokenizer(str(cached_tiny_media_model("qwen2_vl")))
    one = f"<|vision_start|>{IMAGE_PAD * first.num_tokens}<|vision_end|>"
    other = f"<|vision_start|>{IMAGE_PAD * second.num_tokens}<|vision_end|>"
    text = f"<|im_start|>user\na{one}b{other}c<|im_end|>\n<|im_start|>assistant\n"
    assert prompt == tokenizer.encode(text, add_special_tokens=False)
    assert response.json()["usage"]["prompt_tokens"] == len(prompt)


def test_ways_to_name_an_image(client: httpx.Client, server: Server, host: MediaHost, folder: Path) -> None:
    """All of them are the same image."""
    url = picture_url(20, 30)
    keys = []
    for part in (
        image(url),
        image(url, detail="high"),
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {**image(url), "uuid": "mine"},
        image(host.url("/picture")),
        image(f"file://{folder}/x.png"),
    ):
        response = client.post(PATH, json=chat(part, "b"))
        assert response.status_code == 200, response.text
        keys.append(sent(server)[0].media[0].key)
    assert len(set(keys)) == 1
    client.post(PATH, json=chat(image(picture_url(20, 30, 1)), "b"))
    assert sent(server)[0].media[0].key != keys[0]


def test_streams_and_choices(client: httpx.Client, server: Server) -> None:
    stream = post_stream(client, PATH, chat(image(picture_url(20, 30)), "b", n=2, temperature=1))
    assert stream.text(0)
    assert stream.text(1)
    assert len({request.media[0].key for request in server.engines[0].added[-2:]}) == 1


def test_keys_without_effect_are_told(client: httpx.Client) -> None:
    first = image(picture_url(20, 30), detial="low", detail=None)
    second = {**image(picture_url(20, 30), detail="low"), "detail": "high", "uid": "a", "video_url": {"url": "x"}}
    response = client.post(PATH, json=chat(first, "b", second))
    assert response.status_code == 200, response.text
    names = ("0].image_url.detial", "2].detail", "2].uid", "2].video_url")
    assert response.headers["x-ignored-fields"] == ", ".join(f"messages[0].content[{name}" for name in names)
    many = {**image(picture_url(20, 30)), **{f"key{number}": 1 for number in range(1000)}}
    response = client.post(PATH, json=chat(many, "b"))
    assert len(response.headers["x-ignored-fields"]) == 500


def test_the_official_client(server: Server) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai:
        reply = openai.chat.completions.create(
            model=MODEL_NAME,
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is it?"},
                        {"type": "image_url", "image_url": {"url": picture_url(20, 30), "detail": "low"}},
                    ],
                }
            ],
            max_tokens=3,
        )
    assert reply.usage is not None
    assert len(sent(server)[0].media) == 1


def test_tokenize(client: httpx.Client, server: Server) -> None:
    body = chat("a", image(picture_url(20, 30)))
    client.post(PATH, json=body)
    tokenized = client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert tokenized["tokens"] == sent(server)[1]


def test_an_answer_about_an_image_is_continued(client: httpx.Client, server: Server) -> None:
    body = chat("a", image(picture_url(20, 30)), continue_final_message=True, echo=True)
    body["messages"].append({"role": "assistant", "content": "It shows"})
    reply = client.post(PATH, json=body).json()
    assert reply["choices"][0]["message"]["content"].startswith("It shows")
    request, prompt = sent(server)
    tokenizer = load_tokenizer(str(cached_tiny_media_model("qwen2_vl")))
    assert tokenizer.decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\nIt shows")
    assert prompt.count(PAD) == request.media[0].num_tokens


def test_text_alone_and_typed_placeholders(client: httpx.Client, server: Server) -> None:
    client.post(PATH, json=chat(f"what is {IMAGE_PAD}?"))
    request, prompt = sent(server)
    assert (request.media, prompt.count(PAD)) == ((), 1)
    response = client.post(PATH, json=chat(IMAGE_PAD, image(picture_url(20, 30)), f"{IMAGE_PAD}?"))
    request, prompt = sent(server)
    assert response.status_code == 200
    assert prompt.count(PAD) == request.media[0].num_tokens + 2
    assert request.media[0].offset > prompt.index(PAD) + 1


def refused(client: httpx.Client, server: Server, body: dict[str, Any], param: str | None, message: str) -> None:
    """An error in OpenAI's shape, and nothing reached the engine."""
    before = len(server.engines[0].added)
    response = client.post(PATH, json=body)
    assert is_error(response, 400, param or response.json()["error"]["param"]), response.text
    assert re.search(message, response.json()["error"]["message"]), response.text
    assert len(server.engines[0].added) == before


URL = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (image("data:image/png;base64,AAAA"), URL, "no image that can be read"),
        (image("data:image/svg+xml;base64,PHN2Zy8+"), URL, "no image that can be read"),
        (image(data_url(encoded(noise(30, 30))[:900])), URL, "damaged or incomplete"),
        (image(data_url(encoded(noise(1, 300)))), URL, "at most 200 times"),
        (image(data_url(encoded(np.zeros((1001, 1000, 3), np.uint8)))), URL, "--max-image-pixels"),
        (image(data_url(bytes(2_000_001))), URL, "--max-media-bytes"),
        (image("ftp://x.example/y.png"), URL, "http:, https: or data:"),
        (image("x.png"), URL, r"http:, https: or data: .*a file: address, got 'x.png'"),
        (image("iVBORw0KGgo" * 1000), URL, "behind data:image/jpeg;base64,"),
        (image(""), URL, "missing"),
        (image(None), URL, "missing"),
        (image("file:///etc/passwd"), URL, "--allowed-local-media-path"),
        (image("http://127.0.0.1/x.png"), URL, "--allowed-media-domains"),
        (image("data:,x", detail="huge"), "messages[0].content[0].image_url.detail", "auto, low, high"),
        ({"type": "image_url"}, "messages[0].content[0].image_url", "missing"),
        (
            {"type": "image_url", "uuid": "a"},
            "messages[0].content[0].uuid",
            "not sent before to this API server.*send its url",
        ),
        ({"type": "image_url", "image_url": None, "uuid": "a"}, "messages[0].content[0].uuid", "send its url"),
        ({"type": "image_url", "image_url": {"url": None}, "uuid": "a"}, "messages[0].content[0].uuid", "send its url"),
        ({**image(picture_url(20, 30)), "uuid": 7}, "messages[0].content[0].uuid", "text of 1 to"),
        ({**image(picture_url(20, 30)), "uuid": ""}, "messages[0].content[0].uuid", "text of 1 to"),
        ({"type": "image_pil", "image_pil": "x"}, "messages[0].content[0].type", "text, images .image_url. and videos"),
        ({"type": "image", "image": "x"}, "messages[0].content[0].type", "text, images .image_url. and videos"),
        (
            {"type": "input_audio", "input_audio": {}},
            "messages[0].content[0].type",
            "the model 'smol' takes text, images",
        ),
        ({"type": "audio_url", "audio_url": {}}, "messages[0].content[0].type", "takes text, images .image_url. and"),
    ],
)
def test_refusals(client: httpx.Client, server: Server, part: Any, param: str, message: str) -> None:
    refused(client, server, chat(part, "b"), param, message)


def test_refusals_that_need_more(client: httpx.Client, server: Server) -> None:
    picture = image(picture_url(20, 30))
    param = "messages[0].content[3].image_url.url"
    refused(client, server, chat(*[picture] * 4), param, "has 4 images, more than the 3 that --limit-mm-per-prompt")
    refused(client, server, chat(picture, "b" * 100, truncate_prompt_tokens=20), "truncate_prompt_tokens", "truncated")
    refused(client, server, chat(picture, "b " * 1000), "messages", "maximum context length")
    refused(client, server, chat(image(picture_url(256, 256)), "b " * 500), URL, "context")
    big = image(data_url(encoded(noise(500, 500))))  # 750 kB, as random pixels do not become less
    refused(client, server, chat(big, big, big), None, "--max-media-bytes")


def test_no_image_is_fetched_for_a_text_that_is_too_long(client: httpx.Client, server: Server, host: MediaHost) -> None:
    before = len(host.paths)
    refused(client, server, chat(image(host.url("/picture")), "b " * 1000), "messages", "maximum context length")
    assert len(host.paths) == before


def test_no_refused_address_is_asked(client: httpx.Client, server: Server, host: MediaHost) -> None:
    with media_host(picture=answer(encoded(noise(20, 30)))) as sink:
        for spelling in ("127.0.0.1", "2130706433", "0x7f.1", "[::ffff:127.0.0.1]", "127.1"):
            host.pages["/to"] = redirect(sink.url("/picture", spelling))
            for url in (sink.url("/picture", spelling), host.url("/to")):
                refused(client, server, chat(image(url)), URL, "not allowed")
        assert sink.num_connections == 0


def test_others_are_answered_while_images_load(client: httpx.Client, server: Server, host: MediaHost) -> None:
    """A host that does not answer holds up the request that named it, and no other."""
    go_on = threading.Event()

    def held(connection: Any) -> None:
        go_on.wait()
        answer(encoded(noise(20, 30)))(connection)

    host.pages["/held"] = held
    statuses: list[int] = []

    def ask() -> None:
        with server.client() as another:
            statuses.append(another.post(PATH, json=chat(image(host.url("/held")), "b")).status_code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert client.post(PATH, json=chat("a")).status_code == 200
        assert client.post(PATH, json=chat(image(picture_url(20, 30)), "a")).status_code == 200
        assert statuses == []
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 4


def test_no_torch_after_an_image(client: httpx.Client, server: Server) -> None:
    assert client.post(PATH, json=chat(image(picture_url(20, 30)), "b")).status_code == 200
    (child,) = server.children
    maps = Path(f"/proc/{child.process.pid}/maps").read_text()
    assert "_imaging." in maps
    assert "libtorch" not in maps
    assert "/torch/" not in maps


def test_models_of_text_alone() -> None:
    with run_server() as server, server.client() as client:
        param = "messages[0].content[0].type"
        refused(client, server, chat(image(picture_url(20, 30)), "b"), param, "takes text only")
        refused(client, server, chat({"type": "input_audio", "input_audio": {}}), param, "takes text only")


@pytest.mark.slow
def test_images_that_the_engine_cannot_hold() -> None:
    config = qwen()
    scheduler = dataclasses.replace(config.scheduler, max_num_encoder_tokens=8)
    with run_server(engine=dataclasses.replace(config, scheduler=scheduler)) as server, server.client() as client:
        refused(
            client,
            server,
            chat(image(picture_url(60, 60))),
            URL,
            "the engine holds 8 of one image.*--max-num-encoder-input-tokens",
        )


@pytest.mark.slow
def test_no_images_by_flag() -> None:
    """As the flags have it, then the model is one of text alone."""
    engine = qwen()
    alone = replace(engine, model=replace(engine.model, media=None))
    with run_server(engine=alone) as server, server.client() as client:
        param = "messages[0].content[0].type"
        refused(client, server, chat(image(picture_url(20, 30)), "b"), param, "takes text only")
