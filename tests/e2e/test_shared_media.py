"""Prepared images in shared memory (`--mm-processor-cache-type shm`): the same answers as without, whoever ends, and
nothing is left of it."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.test_data_parallel import Deployment
from tests.support.faults import traced_server
from tests.support.pictures import picture_url
from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, run_serve, start_server, wait_for
from tests.support.shared_media import segment_sizes, segments_of
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tests.support.videos import moving, video_file, video_url
from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHARED = ("--mm-processor-cache-type", "shm")
SMALL_STEPS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
START_S = 180.0
GIB = 1 << 30
SIDE = 56
OBJECT_BYTES = 16384
"""What an image of that side takes in pages: 9408 bytes of pixels, a table of 3072, and what it costs elsewhere."""
ROOM_FOR_THREE_GB = (3 * OBJECT_BYTES + 4096) * 16 / 15 / GIB
"""A sixteenth is for names."""


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_tiny_media_model("qwen2_vl")


def body(*seeds: int, text: str = "what?", side: int = SIDE, **fields: Any) -> dict[str, Any]:
    """A chat with an image of each seed."""
    images = [{"type": "image_url", "image_url": {"url": picture_url(side, side, seed)}} for seed in seeds]
    options = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    return {
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}, *images]}],
        **options,
        **fields,
    }


def ask(server: Server, asked: dict[str, Any], headers: dict[str, str] | None = None) -> list[list[int]]:
    response = server.http.post("/v1/chat/completions", json=asked, headers=headers)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def counts(server: Server) -> tuple[float, float]:
    """(hits, queries) of the cache."""
    return server.metric("mm_cache_hits_total"), server.metric("mm_cache_queries_total")


CONVERSATION = [body(1), body(1, 2, text="and now?"), body(2, 1, 3, n=3), body(text="no image"), body(4, 4)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[list[int]]]:
    """Answers without anything shared, by a single process."""
    with start_server(str(model), *TINY_FLAGS, *SMALL_STEPS, "--mm-processor-cache-gb", "0") as server:
        return [ask(server, asked) for asked in CONVERSATION]


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[Server]:
    with start_server(str(model), *TINY_FLAGS, *SMALL_STEPS, *SHARED, *flags, wait=False) as server:
        server.wait_until_ready(timeout_s=START_S)
        yield server


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-tp", "2"),
        ("-tp", "2", "--mm-encoder-tp-mode", "data"),
        ("-pp", "2"),
        ("-tp", "2", "--mm-shm-cache-max-object-size-mb", "1", "--mm-processor-cache-gb", "0.00001"),
    ],
    ids=["alone", "tp", "data", "pp", "no room"],
)
def test_answers_are_those_without_it(model: Path, expected: list[list[list[int]]], flags: Sequence[str]) -> None:
    """The second time every image is known, unless there is no room for any."""
    with serving(model, *flags) as server:
        assert [ask(server, asked) for asked in CONVERSATION] == expected
        assert counts(server) == ((4, 8) if "0.00001" not in flags else (1, 8))
        assert [ask(server, asked) for asked in CONVERSATION] == expected
        assert counts(server) == ((12, 16) if "0.00001" not in flags else (2, 16))
        (taken,) = segment_sizes(server.process.pid).values()
        assert taken == 4096 if "0.00001" in flags else 4 * 12480 < taken <= 4096 + 4 * OBJECT_BYTES
        assert "tensors in memory that workers read (shm), at most" in server.log


def test_each_api_server_has_memory_of_its_own(model: Path, expected: list[list[list[int]]]) -> None:
    """And every engine core and worker has all of it: nothing more than needed, and nothing by name."""
    with serving(model, "-dp", "2", "-tp", "2", "--api-server-count", "2") as server:
        with ThreadPoolExecutor(8) as pool:
            asked = CONVERSATION * 3
            assert list(pool.map(lambda each: ask_anew(server, each), asked)) == expected * 3
        inodes = segments_of(server.process.pid)
        assert len(inodes) == 2
        own = [segments_of(pid) for pid in server.api_server_pids()]
        assert [len(each) for each in own] == [1, 1]
        assert own[0] | own[1] == inodes
        readers = [*server.engine_pids(), *server.worker_pids(0), *server.worker_pids(1)]
        assert len(readers) == 6
        assert all(segments_of(pid) == inodes for pid in readers)


def ask_anew(server: Server, asked: dict[str, Any]) -> list[list[int]]:
    """Over a connection of its own, so that another API server may answer."""
    response = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def test_many_clients_share_room_for_three_images_while_some_leave(model: Path) -> None:
    asked = [body(seed % 7, (seed + 3) % 7, text=f"number {seed}") for seed in range(16)]
    with serving(model, "-tp", "2", "--mm-processor-cache-gb", f"{ROOM_FOR_THREE_GB:.9f}") as server:
        for seed in (1, 2, 3, 1, 2, 3):
            ask(server, body(seed))
        assert counts(server) == (3, 6), "three images fit"
        ask(server, body(4))
        ask(server, body(2))
        ask(server, body(1))
        assert counts(server) == (4, 9), "a fourth one takes the place of the first"
        answers = [ask(server, each) for each in asked]
        for number in range(3):
            with ThreadPoolExecutor(16) as pool:
                told = list(pool.map(ask_or_leave, [server] * 16, asked, range(number, number + 16)))
            left = [index for index, answer in enumerate(told) if answer is None]
            assert len(left) >= 4
            for answer, wanted in zip(told, answers, strict=True):
                assert answer in (None, wanted)
        server.check_idle()
        hits, queries = counts(server)
        for seed in (1, 2, 3, 1, 2, 3):
            ask(server, body(seed))
        after = counts(server)
        assert after[1] - queries == 6
        assert after[0] - hits >= 3, "whoever has left holds nothing"


def ask_or_leave(server: Server, asked: dict[str, Any], number: int) -> list[list[int]] | None:
    """Every fourth client leaves at some moment: it asks for what takes longer than it has patience."""
    if number % 4:
        return ask_anew(server, asked)
    endless = {**asked, "max_tokens": 900}
    with contextlib.suppress(httpx.TimeoutException):
        httpx.post(f"{server.url}/v1/chat/completions", json=endless, timeout=0.01 + 0.03 * number)
    return None


def test_a_new_api_server_goes_on_with_the_memory_of_the_last(model: Path, expected: list[list[list[int]]]) -> None:
    with serving(model, "-tp", "2", "--api-server-count", "1") as server:
        assert ask(server, CONVERSATION[2]) == expected[2]
        for _ in range(2):
            (before,) = server.api_server_pids()
            inodes = segments_of(before)
            os.kill(before, signal.SIGKILL)
            server.drop_connections()
            wait_for(lambda before=before: server.api_server_pids() not in ([], [before]), PATIENCE_S, "another one")
            wait_for(lambda: is_healthy(server), START_S, "a healthy server", poll_s=0.2)
            assert segments_of(server.api_server_pids()[0]) == inodes
            assert [ask(server, asked) for asked in CONVERSATION] == expected


def test_api_servers_die_while_others_use_the_same_images(model: Path, expected: list[list[list[int]]]) -> None:
    """In room for three images, so that places are taken again and again. Who gets an answer gets the right one, and
    nobody is told of an error: a request ends without an answer only with the API server that had it."""
    flags = ("-tp", "2", "--api-server-count", "2", "--mm-processor-cache-gb", f"{ROOM_FOR_THREE_GB:.9f}")
    with serving(model, *flags) as server, ThreadPoolExecutor(6) as pool:
        is_over = threading.Event()
        clients = [pool.submit(keep_asking, server, expected, number, is_over) for number in range(6)]
        for victim in (0, 1, 0):
            pids = server.api_server_pids()
            server.kill(pids[victim])
            wait_for(lambda pids=pids: len(set(server.api_server_pids()) - set(pids)) == 1, START_S, "another one")
            wait_for(lambda: is_healthy(server), START_S, "a healthy server", poll_s=0.2)
        is_over.set()
        answered = [client.result(START_S) for client in clients]
        assert min(answered) > 0
        server.drop_connections()
        server.check_idle()
        assert "Traceback" not in server.log


def keep_asking(server: Server, expected: list[list[list[int]]], number: int, is_over: threading.Event) -> int:
    """Returns how many answers there were, all of them right."""
    num_answers = 0
    turn = number
    while not is_over.is_set() or num_answers == 0:
        turn += 1
        with contextlib.suppress(httpx.TransportError):
            response = httpx.post(
                f"{server.url}/v1/chat/completions", json=CONVERSATION[turn % len(CONVERSATION)], timeout=PATIENCE_S
            )
            if response.status_code == 503:  # an API server that has just been started
                continue
            assert response.status_code == 200, response.text
            answer = [choice["token_ids"] for choice in response.json()["choices"]]
            assert answer == expected[turn % len(CONVERSATION)]
            num_answers += 1
    return num_answers


def is_healthy(server: Server) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return server.http.get("/health").status_code == 200
    return False


def test_a_new_engine_core_gets_the_memory_too(model: Path, expected: list[list[list[int]]]) -> None:
    """After the death of an engine core, and after that of one of its workers."""
    with serving(model, "-tp", "2", "--max-engine-restarts", "5") as server:
        assert ask(server, CONVERSATION[1]) == expected[1]
        hits, queries = counts(server)
        inodes = segments_of(server.process.pid)
        for victim in (server.engine_pids()[0], None):
            engine, workers = server.engine_pids(), server.worker_pids()
            processes = [psutil.Process(pid) for pid in (*engine, *workers)]
            server.kill(victim or workers[1])
            wait_for_ends(processes)
            wait_for(lambda: is_healthy(server), START_S, "a healthy server", poll_s=0.2)
            assert ask(server, CONVERSATION[1]) == expected[1]
            assert all(segments_of(pid) == inodes for pid in (*server.engine_pids(), *server.worker_pids()))
        assert counts(server) == (hits + 4, queries + 4), "images outlive engine cores"


@pytest.mark.parametrize("victim", ["launcher", "engine core", "api server and then all", "nobody"])
def test_nothing_is_left(model: Path, victim: str) -> None:
    flags = (*TINY_FLAGS, *SMALL_STEPS, *SHARED, "-tp", "2", "--api-server-count", "2")
    with traced_server(str(model), *flags, wait=False) as (server, folder):
        server.wait_until_ready(timeout_s=START_S)
        ask(server, CONVERSATION[1])
        processes = [psutil.Process(server.process.pid), *server.descendants()]
        inodes = segments_of(server.process.pid)
        assert len(inodes) == 2
        match victim:
            case "launcher":
                server.process.send_signal(signal.SIGKILL)
            case "engine core":
                server.kill(server.engine_pids()[0])
            case "api server and then all":
                server.kill(server.api_server_pids()[0])
                server.process.terminate()
            case _:
                server.process.terminate()
        server.process.wait(PATIENCE_S)
        wait_for_ends(processes)
        wait_for(lambda: not list(folder.iterdir()), PATIENCE_S, "no run directory")
        holders = [pid for pid in psutil.pids() if segments_of(pid) & inodes]
        assert holders == []


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_videos_and_images_of_newer_models_are_shared_too(family: MediaFamily) -> None:
    """Those of Qwen3-VL in one object for each group of frames."""
    video = {"type": "video_url", "video_url": {"url": video_url(video_file(moving(20, 48, 64), rate=4))}}
    asked = body(1, text="and this?", media_io_kwargs={"video": {"num_frames": 8}})
    asked["messages"][0]["content"].append(video)
    folder = cached_tiny_media_model(family)
    trusting = ("--trust-request-mm-kwargs",)
    with start_server(str(folder), *TINY_FLAGS, *SMALL_STEPS, *trusting, "--mm-processor-cache-gb", "0") as server:
        alone = ask(server, asked)
    with serving(folder, *trusting, "-tp", "2") as server:
        assert [ask(server, asked) for _ in range(2)] == [alone] * 2
        assert counts(server) == (2, 4)
        (taken,) = segment_sizes(server.process.pid).values()
        assert taken > 8 * 48 * 64 * 3


def test_an_engine_core_of_another_launcher_answers_the_same(model: Path, expected: list[list[list[int]]]) -> None:
    """It has no such memory: what was prepared for one rank is read from there for the other."""
    deployment = Deployment(model, *SMALL_STEPS, "-dp", "2")
    with deployment.head("-dpl", "1", *SHARED) as server, deployment.headless("-dpl", "1", "-dpr", "1"):
        server.wait_until_ready(timeout_s=START_S)
        for rank in (0, 1, 1):
            pinned = {"X-data-parallel-rank": str(rank)}
            assert [ask(server, asked, pinned) for asked in CONVERSATION] == expected
        hits, queries = counts(server)
        assert queries - hits == 4, "each image is prepared once"


def test_memory_that_is_not_there_is_a_start_error(model: Path) -> None:
    ended = run_serve(str(model), *TINY_FLAGS, *SHARED, "--mm-processor-cache-gb", "1000", "-asc", "100")
    assert ended.returncode != 0
    assert "prepared media may take 100000.00 GiB of shared memory" in ended.stderr
    assert "lower --mm-processor-cache-gb or --api-server-count" in ended.stderr


def test_offline(model: Path, expected: list[list[list[int]]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": "64M"}
    with LLM(model, mm_processor_cache_type="shm", max_num_batched_tokens=24, **options) as llm:
        inodes = segments_of(os.getpid())
        assert len(inodes) == 1
        for _ in range(2):
            outputs = llm.chat([CONVERSATION[0]["messages"], CONVERSATION[1]["messages"]], params, use_tqdm=False)
            assert [[output.outputs[0].token_ids] for output in outputs] == expected[:2]
    del llm
    assert not segments_of(os.getpid()) & inodes
