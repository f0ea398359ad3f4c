"""Pipelines on two GPUs: the answers of one GPU over HTTP, stages that work at once, ends that are clean."""

import contextlib
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.test_pipeline_parallel import ENDLESS, KINDS, check_logprobs, complete, wait_until_idle
from tests.support.model_loading import model_config
from tests.support.server import Server, start_server, wait_for
from tests.support.streams import BackgroundStream, at_once
from tests.support.tiny_models import cached_tiny_model, tiny_config, write_tokenizer
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BLOCK_SIZE = 16
START_S, WAIT_S = 120.0, 60.0
FLAGS = ("--dtype", "float32", "--max-num-seqs", "32")
CACHE = ("--kv-cache-memory-bytes", "512M")
"""Of a stated size: servers that start at once on one GPU cannot measure what each of them takes."""
STAGED = ("-pp", "2", *CACHE)
VARIANTS: dict[str, tuple[str, ...]] = {
    "graphs": STAGED,
    "chunks": (*STAGED, "--max-num-batched-tokens", "64", "--no-async-scheduling"),
    "eager": (*STAGED, "--enforce-eager", "--max-num-batched-tokens", "64"),
    "crowded": ("-pp", "2", "--num-gpu-blocks-override", "24", "--max-num-batched-tokens", "64"),
    "process": ("--distributed-executor-backend", "mp", *CACHE),
}
"""Of servers that must answer as one does that has the whole model and computes in its engine core."""
TEXT = "the mill turns as long as the river carries water to it and nobody stops the wheel, "


@pytest.fixture(scope="module")
def model() -> Path:
    """Of three layers: two in the first stage, one in the last."""
    return cached_tiny_model("llama", max_position_embeddings=65536)


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[Server]:
    """On one GPU. It compiles most of the kernels of the others."""
    with start_server(str(model), *FLAGS, *CACHE) as server:
        yield server


@pytest.fixture(scope="module")
def servers(model: Path, whole: Server) -> Iterator[dict[str, Server]]:
    """One of each variant, started at once."""
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(start_server(str(model), *FLAGS, *flags, wait=False))
            for name, flags in VARIANTS.items()
        }
        for server in started.values():
            server.wait_until_ready(START_S)
        yield started


def answer_all(server: Server, requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The choices of each, all sent at once."""
    try:
        answers = at_once([lambda r=request: complete(server, r) for request in requests])  # type: ignore[misc]
    except BaseException:
        sys.stderr.write(f"--- end of the server's log ---\n{server.log[-6000:]}\n---\n")
        raise
    return [answer["choices"] for answer in answers]


def check_same(found: list[list[dict[str, Any]]], expected: list[list[dict[str, Any]]]) -> None:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for choice, other in zip(ours, theirs, strict=True):
            assert choice["text"] == other["text"], f"request {number}"
            assert choice["finish_reason"] == other["finish_reason"]
            check_logprobs(choice, other)


@pytest.mark.parametrize("variant", ["graphs", "chunks", "eager", "process"])
def test_answers_are_those_of_one_gpu(variant: str, servers: dict[str, Server], whole: Server) -> None:
    """Thirty requests at once: prompts of many lengths, greedy, seeded, penalized, scored."""
    requests = [
        {"prompt": (TEXT * (1 + number // 2))[number % 7 :], **KINDS[number % len(KINDS)]} for number in range(30)
    ]
    check_same(answer_all(servers[variant], requests), answer_all(whole, requests))
    wait_until_idle(servers[variant])


@pytest.mark.parametrize("variant", ["graphs", "eager"])
def test_prompts_longer_than_any_graph(variant: str, servers: dict[str, Server], whole: Server) -> None:
    """Whole or in pieces, one of them scored: its last stage runs without the graph that the first one has."""
    requests: list[dict[str, Any]] = [
        {"prompt": [3 + (7 * k + size) % 400 for k in range(size)], "temperature": 0, "max_tokens": 8}
        for size in (3000, 2100, 700)
    ]
    requests.append({"prompt": [3 + 11 * k % 400 for k in range(500)], "temperature": 0, "prompt_logprobs": 1})
    check_same(answer_all(servers[variant], requests), answer_all(whole, requests))


def test_preemption(servers: dict[str, Server], whole: Server) -> None:
    requests = [
        {"prompt": f"{number} mills ground", "temperature": 0, "max_tokens": 48, "ignore_eos": True}
        for number in range(16)
    ]
    check_same(answer_all(servers["crowded"], requests), answer_all(whole, requests))
    assert servers["crowded"].metric("num_preemptions_total") > 0


def test_prefixes_are_found_in_every_stage(servers: dict[str, Server], whole: Server) -> None:
    prompt = [3 + 13 * position % 400 for position in range(4 * BLOCK_SIZE)]
    results = [complete(servers["graphs"], {"prompt": prompt, "temperature": 0}) for _ in range(2)]
    cached = [result["usage"]["prompt_tokens_details"]["cached_tokens"] for result in results]
    assert cached == [0, 3 * BLOCK_SIZE]
    expected = complete(whole, {"prompt": prompt, "temperature": 0})["choices"][0]["text"]
    assert {result["choices"][0]["text"] for result in results} == {expected}


def test_all_workers_are_there_and_said_to_be(servers: dict[str, Server]) -> None:
    assert {name: len(server.worker_pids()) for name, server in servers.items()} == {
        **dict.fromkeys(servers, 2),
        "process": 1,
    }
    log = servers["graphs"].log
    assert re.search(r"KV cache: \d+ tokens in \d+ blocks .* per worker", log), log[-2000:]


def test_both_stages_work_at_once(tmp_path: Path) -> None:
    """Steps of prompts, all handed over at once: together they take little longer than in one of two equal stages. One
    stage after the other they would take twice as long."""
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    (folder / "config.json").write_text(json.dumps(tiny_config("llama", **sizes, **heads)))
    write_tokenizer(folder)
    config = EngineConfig(
        model=model_config(folder, load_format="dummy"),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=64),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048),
        device=DeviceConfig(kind="cuda"),
        parallel=ParallelConfig(pipeline_parallel_size=2, executor="mp"),
    )
    lost: list[str] = []
    executor = MultiprocExecutor(
        config, WorkerPool(2), 0, str(tmp_path / "store"), lambda error: lost.append(str(error))
    )
    try:
        executor.initialize()
        plan = rehearsal_plan(8, 256, 1, BLOCK_SIZE, GREEDY)
        executor.submit(plan).result()
        began = time.perf_counter()
        steps = [executor.submit(plan) for _ in range(12)]
        results = [step.result() for step in steps]
        took_s = time.perf_counter() - began
    finally:
        executor.shutdown()
    assert lost == []
    assert all(result.num_new.tolist() == [1] * 8 for result in results)
    slowest_s = sum(result.elapsed_s for result in results)
    assert took_s < 1.5 * slowest_s, f"12 steps took {took_s:.4f} s, {slowest_s:.4f} s of them in the slower stage"


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_stages_of_two_gpus_each(model: Path, whole: Server) -> None:
    requests = [{"prompt": TEXT[number:], **KINDS[number % len(KINDS)]} for number in range(12)]
    with start_server(str(model), *FLAGS, *STAGED, "-tp", "2", wait=False) as server:
        server.wait_until_ready(START_S)
        check_same(answer_all(server, requests), answer_all(whole, requests))


@pytest.mark.parametrize(("variant", "rank"), [("chunks", 0), ("graphs", 1)])
def test_a_killed_stage_ends_the_server_and_frees_its_gpus(variant: str, rank: int, servers: dict[str, Server]) -> None:
    """These servers are of no use afterwards, so this comes last."""
    server = servers[variant]
    stream = BackgroundStream(server.url, "/v1/completions", **ENDLESS)
    stream.wait_for_events(3)
    free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    killed_at = time.monotonic()
    server.kill(server.worker_pids()[rank])
    error = stream.result(WAIT_S).error
    assert error is not None
    assert error["code"] == "engine_dead"
    assert f"worker 0.{rank} was killed" in error["message"]
    assert stream.ended_at - killed_at < 10
    assert server.process.wait(WAIT_S) == 1
    for device in range(2):
        wait_for(
            lambda device=device: torch.cuda.mem_get_info(device)[0] > free[device] + 2**28,  # type: ignore[misc]
            WAIT_S,
            f"free memory of GPU {device}",
        )
