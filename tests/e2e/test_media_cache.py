"""Images that are known, in a real server: whoever dies, leaves or is refused, answers are those of transformers."""

import json
import random
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.e2e.conftest import TINY_FLAGS
from tests.support.connections import get_from_each
from tests.support.image_chats import ImageOracle
from tests.support.image_serving import COUNT, Pixels, Served, body
from tests.support.media_host import answer, media_host
from tests.support.pictures import data_url, encoded, noise
from tests.support.server import PATIENCE_S, check_error, start_server, wait_for
from tests.support.streams import BackgroundStream
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill import LLM, SamplingParams
from tokenmill_engine.errors import RequestError

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
THREE_IMAGES_GB = "0.000025"
"""GiB for three images of 24 x 24 pixels, whose tensors and entry take 6.8 kB each."""
RESTART_S = 2 * PATIENCE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes images of up to 128 x 128 pixels, which are larger than a small cache."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    shutil.copytree(cached_tiny_media_model("qwen2_vl"), folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_pixels": 128 * 128}))
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> ImageOracle:
    return ImageOracle(folder)


def serve(folder: Path, oracle: ImageOracle, *flags: str) -> Iterator[Served]:
    given = (*TINY_FLAGS, "--allowed-media-domains", "localhost", "--max-engine-restarts", "50", *flags)
    with start_server("--model", str(folder), *given) as server:
        yield Served(server, oracle)


@pytest.fixture(scope="module")
def served(folder: Path, oracle: ImageOracle) -> Iterator[Served]:
    """One API server and one engine core: the former has keys, the latter what they stand for."""
    yield from serve(folder, oracle, "--image-fetch-timeout", "600")


@pytest.fixture(scope="module", params=["keys", "items", "nowhere"])
def small(request: pytest.FixtureRequest, folder: Path, oracle: ImageOracle) -> Iterator[Served]:
    """A cache that holds three images, wherever it is, or none."""
    servers = ("-dp", "2", "--api-server-count", "2") if request.param == "items" else ()
    cache = "0" if request.param == "nowhere" else THREE_IMAGES_GB
    yield from serve(folder, oracle, "--mm-processor-cache-gb", cache, *servers)


def lookups(served: Served) -> tuple[float, float]:
    """(hits, queries)"""
    return served.server.metric("mm_cache_hits_total"), served.server.metric("mm_cache_queries_total")


def wait_until_it_serves(served: Served) -> None:
    wait_for(lambda: served.server.http.get("/health").status_code == 200, RESTART_S, "a server that serves again")


def kill_engine(served: Served) -> None:
    pid = served.server.engine_pids()[0]
    served.server.kill(pid)
    wait_for(lambda: not psutil.pid_exists(pid), RESTART_S, "the end of an engine core")
    wait_for(lambda: served.server.http.get("/health").status_code == 503, RESTART_S, "a server that knows")
    wait_until_it_serves(served)


def test_the_log_says_where(served: Served, small: Served) -> None:
    assert "keys in the API server, tensors in the engine core (lru), at most 4 GiB" in served.server.log
    lines = re.findall(r"cache of prepared media: .*", small.server.log)
    assert len(lines) == 1, lines


def test_a_conversation(served: Served) -> None:
    """Ten turns, four images: each is prepared once."""
    hits, queries = lookups(served)
    pictures = [noise(30, 40 + seed, seed) for seed in range(4)]
    for turn in range(10):
        shown: list[str | Pixels] = []
        for seed in range(min(turn + 1, 4)):
            shown += [pictures[seed], f"and {seed}"]
        served.check(*shown, f"turn {turn}")
    looked = sum(min(turn + 1, 4) for turn in range(10))
    assert lookups(served) == (hits + looked - 4, queries + looked)


def test_choices_and_known_images(served: Served) -> None:
    pixels = noise(44, 46, 77)
    for _ in range(2):
        reply = served.check(pixels, "what?", n=4)
        assert len(reply["choices"]) == 4


def test_a_refused_request_is_no_half_entry(small: Served) -> None:
    """The same image later, and then so many others that it is evicted: all are answered as by a server that never saw
    it before."""
    picture = noise(24, 24, 1000)
    too_long = body(picture, "too long " * 2000)
    check_error(small.server.http.post(PATH, json=too_long), 400)
    small.check(picture, "short")
    for seed in range(6):
        small.check(noise(24, 24, 2000 + seed), "others")
    small.check(picture, "short")
    small.check(picture, noise(24, 24, 2000), picture, "swapped")
    small.check(noise(24, 24, 2000), picture, picture, "swapped")


def test_the_same_bytes_as_other_images(small: Served) -> None:
    pixels = noise(120, 80, 3)
    shades = Image.fromarray(noise(30, 40)[:, :, 0] % 16)
    paletted = []
    for seed in range(2):
        image = Image.new("P", shades.size)
        image.putdata(list(shades.tobytes()))
        image.putpalette(noise(16, 1, seed).tobytes())
        paletted.append(image)
    for _ in range(2):
        small.check(pixels, "what?")
        small.check(pixels.reshape(80, 120, 3), "what?")
        for image in (*paletted, shades):
            asked = body("what?")
            part = {"type": "image_url", "image_url": {"url": data_url(encoded(image))}}
            asked["messages"][0]["content"].append(part)
            small.check_reply(small.ask(asked), [np.asarray(image.convert("RGB"))])


def test_more_images_than_the_cache_holds(small: Served) -> None:
    """In one request; and one that is larger than all of it."""
    pictures = [noise(24, 24, seed) for seed in range(5)]
    large = noise(128, 128)
    for _ in range(2):
        small.check(*pictures, "many")
        small.check(pictures[4], large, pictures[0], "large")


def test_many_clients_of_whom_some_leave(small: Served) -> None:
    """16 at a time, over six images of which the cache holds three."""
    pictures = [noise(24, 24, seed) for seed in range(6)]

    def client(number: int) -> list[tuple[dict[str, Any], list[Pixels]]]:
        rng = random.Random(number)
        answers = []
        for _ in range(4):
            chosen = [pictures[rng.randrange(6)] for _ in range(rng.randrange(1, 4))]
            asked = body(*chosen, f"client {number}")
            if rng.random() < 0.3:
                left = BackgroundStream(small.server.url, PATH, **{**asked, "stream": True, "max_tokens": 200})
                if rng.random() < 0.5:
                    left.wait_for_events()
                left.leave()
                continue
            with httpx.Client(base_url=small.server.url, trust_env=False, timeout=PATIENCE_S) as http:
                response = http.post(PATH, json=asked)
            assert response.status_code == 200, response.text
            answers.append((response.json(), chosen))
        return answers

    with ThreadPoolExecutor(16) as pool:
        answers = [each for client_answers in pool.map(client, range(16)) for each in client_answers]
    assert len(answers) > 16
    for reply, chosen in answers:
        small.check_reply(reply, chosen)
    small.server.check_idle()


def test_a_uuid_instead_of_an_image(served: Served) -> None:
    picture = noise(35, 45, 50)
    asked = body(picture, "what?")
    part = asked["messages"][0]["content"][0]
    part["uuid"] = "holiday"
    first = served.ask(asked)
    named = body("what?")
    named["messages"][0]["content"].insert(0, {"type": "image_url", "image_url": None, "uuid": "holiday"})
    reply = served.ask(named)
    assert reply["prompt_token_ids"] == first["prompt_token_ids"]
    served.check_reply(reply, [picture])
    stranger = served.server.http.post(PATH, json=named, headers={"Authorization": "Bearer someone-else"})
    assert "send its url" in check_error(stranger, 400)["message"]
    kill_engine(served)
    assert "send its url" in check_error(served.server.http.post(PATH, json=named), 400)["message"]
    served.check_reply(served.ask(asked), [picture])
    served.check_reply(served.ask(named), [picture])


def test_an_engine_that_was_killed_has_nothing_and_is_sent_all(served: Served) -> None:
    """Also by a request that was told before that its image is there."""
    known, other = noise(50, 30, 60), noise(20, 30, 61)
    served.check(known, "before")
    go_on = threading.Event()
    with media_host() as host:

        def held(connection: Any) -> None:
            go_on.wait()
            answer(encoded(other))(connection)

        host.pages["/held"] = held
        asked = body(known, "between")
        part = {"type": "image_url", "image_url": {"url": host.url("/held")}}
        asked["messages"][0]["content"].append(part)
        hits, _ = lookups(served)
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(served.ask, asked)
            wait_for(lambda: lookups(served)[0] == hits + 1 and host.paths, PATIENCE_S, "an image that is known")
            kill_engine(served)
            go_on.set()
            served.check_reply(reply.result(), [known, other])
    served.check(known, "after")


def test_a_killed_api_server_leaves_an_engine_that_has_more(served: Served) -> None:
    picture = noise(50, 30, 70)
    served.check(picture, "before")
    (pid,) = served.server.api_server_pids()
    served.server.kill(pid)
    wait_for(lambda: served.server.api_server_pids() not in ([], [pid]), RESTART_S, "another API server")
    served.server.drop_connections()
    served.check(picture, "after")
    served.check(picture, "after", n=2)


def test_every_api_server_has_the_counts_of_all(small: Served) -> None:
    def counts(text: bytes) -> list[bytes]:
        return sorted(line for line in text.splitlines() if b"mm_cache" in line and not line.startswith(b"#"))

    before = {tuple(counts(text)) for _, text in get_from_each(small.server, "/metrics")}
    assert len(before) == 1
    small.check(noise(10, 10, 99), "one more")
    after = {tuple(counts(text)) for _, text in get_from_each(small.server, "/metrics")}
    assert len(after) == 1
    assert len(after.pop()) == 2
    if "none" not in re.findall(r"cache of prepared media: .*", small.server.log)[0]:
        assert before != after


def test_what_is_larger_than_the_cache_is_said_once(small: Served) -> None:
    for _ in range(2):
        small.check(noise(120, 120, 1), "large")
    warnings = small.server.log.count("larger than the whole cache")
    has_none = "cache of prepared media: none" in small.server.log
    assert warnings == 0 if has_none else 1 <= warnings <= 2  # of each API server


def test_offline(folder: Path, oracle: ImageOracle) -> None:
    """Images of Pillow's have names, too, in prompts as in conversations; many share what they show."""
    pixels = noise(30, 40, 5)
    whole = {"type": "image_pil", "image_pil": Image.fromarray(pixels), "uuid": "mine"}
    named = {"type": "image_pil", "image_pil": None, "uuid": "mine"}
    text = {"type": "text", "text": "what?"}
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with LLM(folder, device="cpu", dtype="float32", kv_cache_memory_bytes="64M", max_model_len=1024) as llm:
        with pytest.raises(RequestError, match="not sent before"):
            llm.chat([{"role": "user", "content": [named, text]}], params, use_tqdm=False)
        messages = [{"role": "user", "content": [whole, text]}]
        outputs = llm.chat([messages] * 3, params, use_tqdm=False)
        outputs += llm.chat([{"role": "user", "content": [named, text]}], params, use_tqdm=False)
        given = {"multi_modal_data": {"image": None}, "multi_modal_uuids": {"image": "mine"}}
        outputs += llm.generate({"prompt": outputs[0].prompt, **given}, params, use_tqdm=False)
    for output in outputs:
        ids = output.outputs[0].token_ids
        assert ids == oracle.greedy(output.prompt_token_ids, [pixels], ids)
