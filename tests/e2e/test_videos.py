"""Chats with videos over HTTP and through `LLM`, with tiny models of each family, against transformers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.media_host import answer, media_host
from tests.support.pictures import data_url, encoded, noise
from tests.support.server import Server, start_server
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tests.support.video_chats import Frames, MediaOracle, Shown
from tests.support.videos import decoded, moving, video_file, video_url
from tokenmill import LLM, SamplingParams

pytestmark = pytest.mark.slow

FAMILIES: tuple[MediaFamily, ...] = ("llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SMALL_STEPS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
"""Prompts are computed in pieces that end within videos."""
FLAGS = (*TINY_FLAGS, *SMALL_STEPS, "--allowed-media-domains", "localhost", "--trust-request-mm-kwargs")
READING = {"media_io_kwargs": {"video": {"num_frames": 8}}}
COUNT = 10
VIDEO = video_file(moving(20, 48, 64), rate=4)
WANTED = (0, 2, 5, 8, 10, 13, 16, 19)
"""Eight of twenty, evenly spread."""
SHOWN = Shown([decoded(VIDEO)[index] for index in WANTED], 8 / 20 * 4)
PATH = "/v1/chat/completions"


@dataclass
class Served:
    """A server and what its model should say."""

    server: Server
    oracle: MediaOracle

    def check(self, media: Sequence[Frames | Shown], *parts: Any, **fields: Any) -> dict[str, Any]:
        """The reply to parts of a message, which is transformers' own."""
        response = self.server.http.post(PATH, json=body(*parts, **fields))
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        for choice in reply["choices"]:
            assert len(choice["token_ids"]) == COUNT
            wanted = self.oracle.answer(reply["prompt_token_ids"], media, choice["token_ids"])
            assert choice["token_ids"] == wanted
        return reply


def video(data: bytes | str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data if isinstance(data, str) else video_url(data)}}


def picture(pixels: Frames) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(encoded(pixels))}}


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    options = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **READING, **options, **fields}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return cached_tiny_media_model(request.param)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with start_server("--model", str(folder), *FLAGS) as server:
        yield Served(server, MediaOracle(folder))


def test_videos_and_images_between_text(served: Served) -> None:
    image = noise(30, 40)
    served.check([SHOWN], "What happens?", video(VIDEO))
    served.check([image, SHOWN], picture(image), "then", video(VIDEO), "differ")
    served.check([SHOWN, SHOWN], video(VIDEO), "and again", video(VIDEO), n=2, temperature=0)


def test_frames_are_resized(served: Served) -> None:
    data = video_file(moving(20, 90, 130), rate=4)
    shown = Shown([decoded(data)[index] for index in WANTED], SHOWN.fps)
    served.check([shown], video(data), "what?")


def test_an_animation_is_a_video(served: Served) -> None:
    data = video_file(moving(20, 48, 64), "gif", "gif", rate=4)
    shown = Shown([decoded(data)[index] for index in WANTED], SHOWN.fps)
    served.check([shown], video(video_url(data, "image/gif")), "what?")


def test_videos_are_remembered(served: Served) -> None:
    """A second time nothing is decoded, and the prompt is found in the cache; another order of frames is another."""
    data = video_file(moving(20, 48, 64, 5), rate=4)
    shown = Shown([decoded(data)[index] for index in WANTED], SHOWN.fps)
    text = "a text that is long enough for blocks behind the video"
    cold = served.check([shown], video(data), text)
    hits = cache_hits(served.server)
    warm = served.check([shown], video(data), text)
    assert cache_hits(served.server) == hits + 1
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > len(cold["prompt_token_ids"]) // 2
    back = video_file(decoded(data)[::-1], rate=4)
    served.check([Shown([decoded(back)[index] for index in WANTED], SHOWN.fps)], video(back), text)


def cache_hits(server: Server) -> float:
    text = server.http.get("/metrics").text
    return sum(map(float, re.findall(r"^\w+:mm_cache_hits_total\{.*\} (.*)$", text, re.MULTILINE)))


def test_what_a_request_says_of_its_frames(served: Served) -> None:
    for number in (4, 6):
        reading = {"video": {"num_frames": number}}
        indices = [round(each - 0.5 + 1e-9) for each in (19 * step / (number - 1) for step in range(number))]
        shown = Shown([decoded(VIDEO)[int(index)] for index in indices], number / 20 * 4)
        served.check([shown], video(VIDEO), "what?", media_io_kwargs=reading)
    if not served.oracle.has_limits:
        return
    many = served.check([SHOWN], video(VIDEO), "what?")
    said = {"max_pixels": 2048 if served.oracle.is_counted_by_frame else 2048 * 8}
    response = served.server.http.post(PATH, json=body(video(VIDEO), "what?", mm_processor_kwargs=said))
    assert response.json()["usage"]["prompt_tokens"] < many["usage"]["prompt_tokens"]


def test_videos_from_a_host(served: Served) -> None:
    with media_host(video=answer(VIDEO)) as host:
        served.check([SHOWN], video(host.url("/video")), "what?")


def test_a_refused_video_leaves_nothing_behind(served: Served) -> None:
    for broken in (VIDEO[: len(VIDEO) // 2], b"x"):
        response = served.server.http.post(PATH, json=body(video(VIDEO), video(broken)))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages[0].content[1].video_url.url"
    served.check([SHOWN], video(VIDEO), "short")


def test_offline(folder: Path) -> None:
    """`LLM.chat` says the same, and `LLM.generate` with the frames themselves."""
    oracle = MediaOracle(folder)
    messages = [{"role": "user", "content": [video(VIDEO), {"type": "text", "text": "what?"}]}]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with LLM(folder, device="cpu", dtype="float32", kv_cache_memory_bytes="64M", max_model_len=1024) as llm:
        (output,) = llm.chat(messages, params, use_tqdm=False, **READING)
        ids = output.outputs[0].token_ids
        assert len(ids) == COUNT
        assert ids == oracle.answer(output.prompt_token_ids, [SHOWN], ids)
        said: dict[str, Any] = {"num_frames": 4}
        (fewer,) = llm.chat(messages, params, use_tqdm=False, mm_processor_kwargs=said)
        assert len(fewer.prompt_token_ids) < len(output.prompt_token_ids)
        chosen = {"fps": 4, "total_num_frames": 20, "frames_indices": WANTED}
        frames = decoded(VIDEO)
        prompts = [
            {"prompt": output.prompt, "multi_modal_data": {"video": (np.stack(SHOWN.frames), chosen)}},
            {"prompt": output.prompt, "multi_modal_data": {"video": (frames, {"fps": 4})}, "mm_processor_kwargs": said},
        ]
        for given, wanted in zip(llm.generate(prompts, params, use_tqdm=False), (output, fewer), strict=True):
            assert given.prompt_token_ids == wanted.prompt_token_ids
            assert given.outputs[0].token_ids == wanted.outputs[0].token_ids
