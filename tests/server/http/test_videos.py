"""Videos in chats, in front of an engine that only echoes: what reaches it, and what is refused before."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server.http.test_images import PATH, chat, image, qwen, refused, sent
from tests.support.api_server import Server, run_server
from tests.support.pictures import data_url, encoded, noise, picture_url
from tests.support.tiny_media_models import ADDED_TOKENS, VIDEO_PAD
from tests.support.video_oracle import patches
from tests.support.videos import decoded, moving, video_file, video_url
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import MediaSettings, PromptLimits
from tokenmill_server.multimodal.video_options import read_video_options
from tokenmill_server.multimodal.video_reading import VideoReading

VIDEO = video_file(moving(12, 48, 64), rate=4)
PAD = ADDED_TOKENS[VIDEO_PAD]
URL = "messages[0].content[0].video_url.url"
KIND = "messages[0].content[0].type"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media")
    (path / "x.mp4").write_bytes(VIDEO)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    media = MediaSettings(
        limits=PromptLimits(images=3, videos=1),
        local_path=str(folder),
        max_bytes=2_000_000,
        max_video_pixels=200_000,
        max_video_frames=8,
        max_video_duration_s=30.0,
        video_decode_timeout_s=120.0,
        video_reading=VideoReading(6),
        trusts_requests=True,
        loading_threads=2,
    )
    with run_server(engine=qwen(), engine_options={"max_model_len": 1024}, media=media) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def video(url: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def test_what_reaches_the_engine(client: httpx.Client, server: Server) -> None:
    response = client.post(PATH, json=chat("a", video(video_url(VIDEO)), image(picture_url(20, 30)), "b"))
    assert response.status_code == 200, response.text
    request, prompt = sent(server)
    film, picture = request.media
    assert (film.kind, picture.kind, film.grid) == ("video", "image", (3, 12, 16))
    assert film.seconds_per_step is None
    assert prompt[film.offset : film.offset + film.num_tokens] == [PAD] * film.num_tokens == [PAD] * (3 * 6 * 8)
    assert response.json()["usage"]["prompt_tokens"] == len(prompt)
    model = Path(qwen().model.path)
    media = resolve_model(str(model)).media
    assert media is not None
    options = read_video_options(model, media)
    frames = np.stack([decoded(VIDEO)[index] for index in (0, 2, 4, 6, 8, 11)])
    pixels, values = film.tensors["pixel_values"], film.tensors["values"]
    packed = np.frombuffer(pixels.data, np.uint8).reshape(pixels.shape)
    table = np.frombuffer(values.data, np.float32).reshape(values.shape)
    channels = np.repeat(np.arange(3), packed.shape[1] // 3)
    np.testing.assert_array_equal(table[channels, packed], patches(frames, options))


def test_ways_to_name_a_video(client: httpx.Client, server: Server, folder: Path) -> None:
    """All of them are the same video."""
    url, keys = video_url(VIDEO), set()
    for part in (
        video(url),
        {"type": "video_url", "video_url": url},
        {**video(url), "uuid": "mine"},
        {"type": "video_url", "uuid": "mine"},
        video(video_url(VIDEO, "application/octet-stream")),
        video(f"file://{folder}/x.mp4"),
    ):
        response = client.post(PATH, json=chat(part, "b"))
        assert response.status_code == 200, response.text
        keys.add(sent(server)[0].media[0].key)
    assert len(keys) == 1


def test_tokenize(client: httpx.Client, server: Server) -> None:
    body = chat("a", video(video_url(VIDEO)))
    client.post(PATH, json=body)
    tokenized = client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert tokenized["tokens"] == sent(server)[1]


def test_what_a_request_says(client: httpx.Client, server: Server) -> None:
    """It changes what the engine gets, and its key."""
    found = []
    for fields in (
        {},
        {"media_io_kwargs": {"video": {"num_frames": 4}}},
        {"media_io_kwargs": {"video": {"num_frames": -1, "fps": 1}}},
        {"mm_processor_kwargs": {"max_pixels": 1024}},
        {"mm_processor_kwargs": {"fps": 2, "min_frames": 2}},
        {"mm_processor_kwargs": {"num_frames": 8}},
    ):
        response = client.post(PATH, json=chat(video(video_url(VIDEO)), "b", **fields))
        assert response.status_code == 200, response.text
        assert "x-ignored-fields" not in response.headers
        item = sent(server)[0].media[0]
        found.append((item.grid, item.key))
    assert [grid for grid, _ in found] == [(3, 12, 16), (2, 12, 16), (2, 12, 16), (3, 6, 8), (3, 12, 16), (4, 12, 16)]
    assert len({key for _, key in found}) >= 5
    pictures = []
    for fields in ({}, {"mm_processor_kwargs": {"min_pixels": 4000}}):
        client.post(PATH, json=chat(image(picture_url(20, 30)), "b", **fields))
        pictures.append(sent(server)[0].media[0].num_tokens)
    assert pictures[0] < pictures[1]


@pytest.mark.parametrize(
    ("part", "param", "message"),
    [
        (video("data:video/mp4;base64,AAAA"), URL, "no video that can be read; MP4"),
        (video(picture_url(20, 30)), URL, "no video that can be read"),
        (video(video_url(VIDEO[: len(VIDEO) // 2])), URL, "damaged or incomplete"),
        (video(data_url(bytes(2_000_001))), URL, "--max-media-bytes"),
        (video(video_url(video_file(moving(2, 400, 600)))), URL, "--max-video-pixels"),
        (video(video_url(video_file(moving(40, 16, 16), rate=1))), URL, "--max-video-duration"),
        (video("ftp://x.example/y.mp4"), URL, "a video has an http:, https: or data:"),
        (video(None), URL, "missing"),
        (video("file:///etc/passwd"), URL, "--allowed-local-media-path"),
        (video("http://127.0.0.1/x.mp4"), URL, "--allowed-media-domains"),
        ({"type": "video_url"}, "messages[0].content[0].video_url", "missing"),
        ({"type": "video_url", "uuid": "who"}, "messages[0].content[0].uuid", "no video is known under this uuid"),
        ({"type": "input_audio", "input_audio": {}}, KIND, "'smol' takes text, images .image_url. and videos"),
    ],
)
def test_refusals(client: httpx.Client, server: Server, part: Any, param: str, message: str) -> None:
    refused(client, server, chat(part, "b"), param, message)


def test_refusals_that_need_more(client: httpx.Client, server: Server) -> None:
    film = video(video_url(VIDEO))
    second = "messages[0].content[1].video_url.url"
    refused(client, server, chat(film, film), second, "has 2 videos, more than the 1 that --limit-mm-per-prompt")
    reading = {"media_io_kwargs": {"video": {"num_frames": -1}}}
    refused(client, server, chat(film, **reading), URL, "12 frames .* more than the 8 that --max-video-frames")
    refused(
        client,
        server,
        chat(film, "b " * 440),
        URL,
        "the video takes 144 tokens, and .* .--max-model-len. has room for .* more",
    )
    for fields, param, message in (
        ({"media_io_kwargs": {"video": {"frames": 1}}}, "media_io_kwargs", "known are num_frames and fps"),
        ({"mm_processor_kwargs": {"num_crops": 1}}, "mm_processor_kwargs", "'num_crops' is not known; known are size"),
    ):
        refused(client, server, chat(film, **fields), param, message)


def test_requests_are_not_trusted_unless_told(folder: Path) -> None:
    media = MediaSettings(processor_kwargs=ProcessorKwargs(max_pixels=1024), video_reading=VideoReading(4))
    with run_server(engine=qwen(), media=media) as server, server.client() as client:
        film = video(video_url(VIDEO))
        for name, value in (("mm_processor_kwargs", {"fps": 1}), ("media_io_kwargs", {"video": {"fps": 1}})):
            refused(client, server, chat(film, **{name: value}), name, "--trust-request-mm-kwargs")
        assert client.post(PATH, json=chat(film, mm_processor_kwargs={}, media_io_kwargs=None)).status_code == 200
        assert sent(server)[0].media[0].grid == (2, 6, 8)


@pytest.mark.slow
def test_models_without_videos() -> None:
    film = video(video_url(VIDEO))
    with run_server() as server, server.client() as client:
        refused(client, server, chat(film, "b"), KIND, "'smol' takes text only")
        for name in ("mm_processor_kwargs", "media_io_kwargs"):
            refused(client, server, chat("b", **{name: {"fps": 1}}), name, "takes text only")
    media = MediaSettings(limits=PromptLimits(videos=0))
    with run_server(engine=qwen(), media=media) as server, server.client() as client:
        refused(client, server, chat(film, "b"), KIND, re.escape("takes text and images (image_url) here"))
        assert client.post(PATH, json=chat(image(data_url(encoded(noise(20, 30)))), "b")).status_code == 200


def test_the_server_maps_no_decoder_of_videos(client: httpx.Client, server: Server) -> None:
    assert client.post(PATH, json=chat(video(video_url(VIDEO)), "b")).status_code == 200
    (child,) = server.children
    maps = Path(f"/proc/{child.process.pid}/maps").read_text()
    assert "libavcodec" not in maps
    assert "libtorch" not in maps
