"""A server and `LLM` on a CUDA device, end to end over HTTP."""

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.server import Server, run_serve, start_server, wait_for
from tests.support.streams import BackgroundStream, at_once, read_stream
from tests.support.tiny_models import cached_tiny_model
from tokenmill import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

PROMPTS = [f"{number} mills ground" for number in range(16)]
LIMIT = 48
SHARE = 0.1


@pytest.fixture(scope="module")
def model() -> Path:
    return cached_tiny_model("llama", max_position_embeddings=65536)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--gpu-memory-utilization", str(SHARE), "--max-num-seqs", "32", "-asc", "2")
    with start_server(str(model), *flags) as server:
        server.remember_control()
        yield server


@pytest.fixture(scope="module")
def cpu_texts(model: Path) -> list[str]:
    """What the CPU says to each prompt, greedily."""
    with LLM(model, device="cpu", dtype="float32", kv_cache_memory_bytes="64M") as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=LIMIT, ignore_eos=True))
    return [output.outputs[0].text for output in outputs]


def kv_tokens(server: Server) -> int:
    match = re.search(r"KV cache: (\d+) tokens", server.log)
    assert match is not None
    return int(match[1])


def test_the_device_is_found_and_answers_as_the_cpu(server: Server, cpu_texts: list[str]) -> None:
    """Without --device; sixteen requests at once, whole and streamed."""
    assert "on cuda (float32)" in server.log
    fields: dict[str, Any] = {"max_tokens": LIMIT, "temperature": 0, "ignore_eos": True}

    def whole(prompt: str) -> str:
        return server.text(prompt, **fields)

    def streamed(prompt: str) -> str:
        return read_stream(server.url, "/v1/completions", {"prompt": prompt, **fields}).text()

    assert at_once([lambda p=p: whole(p) for p in PROMPTS]) == cpu_texts  # type: ignore[misc]
    assert at_once([lambda p=p: streamed(p) for p in PROMPTS]) == cpu_texts  # type: ignore[misc]
    messages = [{"role": "user", "content": "Hello"}]
    chat = {"messages": messages, "max_tokens": LIMIT, "temperature": 0}
    reply = server.post("/v1/chat/completions", **chat).json()["choices"][0]["message"]["content"]
    assert read_stream(server.url, "/v1/chat/completions", chat).text() == reply
    server.check_idle()
    server.check_alive()


def test_structured_outputs_beside_free_ones(server: Server, cpu_texts: list[str]) -> None:
    """Greedy and random, with and without graphs for what else they ask: outputs follow, and free ones are as ever."""
    bound: list[dict[str, Any]] = [
        {"temperature": 0, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}},
        {"temperature": 1, "structured_outputs": {"regex": "[a-f]{3}-[0-9]{4}"}},
        {"temperature": 1, "logprobs": 1, "top_p": 0.9, "structured_outputs": {"choice": ["abc-0000", "def-1111"]}},
        {"temperature": 0, "frequency_penalty": 1, "structured_outputs": {"choice": ["abc-0000", "def-1111"]}},
    ]
    free: dict[str, Any] = {"max_tokens": LIMIT, "temperature": 0, "ignore_eos": True}

    def complete(number: int) -> str:
        if number % 2:
            return server.text(PROMPTS[number], **free)
        return server.text(PROMPTS[number], max_tokens=LIMIT, **bound[number // 2 % len(bound)])

    texts = at_once([lambda n=n: complete(n) for n in range(len(PROMPTS))])  # type: ignore[misc]
    assert texts[1::2] == cpu_texts[1::2]
    assert all(re.fullmatch("[a-f]{3}-[0-9]{4}", text) for text in texts[::2])
    server.check_idle()
    server.check_alive()


def test_prompts_that_arrive_beside_running_streams(model: Path, server: Server) -> None:
    """Prompts of all lengths, greedy and seeded, some twice, start while others run and yet others are left: steps
    mix all of that, and every text is the one that the CPU gives to the prompt alone."""
    prompts = [" ".join(f"{number} mills ground {k}" for k in range(1 + number**2 // 2)) for number in (*range(10), 9)]
    fields: list[dict[str, Any]] = [
        {"max_tokens": LIMIT, "ignore_eos": True, "temperature": 0.0 if number % 2 else 1.0, "seed": number}
        for number in range(len(prompts))
    ]
    with LLM(model, device="cpu", dtype="float32", kv_cache_memory_bytes="64M") as llm:
        outputs = llm.generate(prompts, [SamplingParams(**each) for each in fields])
    expected = [output.outputs[0].text for output in outputs]

    def stream(number: int) -> str:
        time.sleep(0.02 * number)
        left = {"prompt": prompts[-number], "max_tokens": 1000, "ignore_eos": True}
        read_stream(server.url, "/v1/completions", left, go_on=lambda stream: len(stream.events) < 3)
        return read_stream(server.url, "/v1/completions", {"prompt": prompts[number], **fields[number]}).text()

    assert at_once([lambda n=n: stream(n) for n in range(len(prompts))]) == expected  # type: ignore[misc]
    server.check_idle()
    server.check_alive()


def test_memory_share_and_eager_mode(model: Path, server: Server) -> None:
    """Half the share, about half the KV cache; without graphs the text is the same."""
    flags = ("--dtype", "float32", "--gpu-memory-utilization", str(SHARE / 2), "--enforce-eager")
    with start_server(str(model), *flags) as smaller:
        assert 0.3 < kv_tokens(smaller) / kv_tokens(server) < 0.6
        prompt = PROMPTS[0]
        assert smaller.text(prompt, max_tokens=LIMIT) == server.text(prompt, max_tokens=LIMIT)


def test_preemption(model: Path, cpu_texts: list[str]) -> None:
    with start_server(str(model), "--dtype", "float32", "--num-gpu-blocks-override", "24") as tiny:
        fields = {"max_tokens": LIMIT, "temperature": 0, "ignore_eos": True}
        texts = at_once([lambda p=p: tiny.text(p, **fields) for p in PROMPTS])  # type: ignore[misc]
        assert texts == cpu_texts
        assert tiny.metric("num_preemptions_total") > 0


def test_killed_engine_core_frees_the_device(model: Path) -> None:
    free_before = torch.cuda.mem_get_info()[0]
    with start_server(str(model), "--gpu-memory-utilization", str(SHARE)) as server:
        assert torch.cuda.mem_get_info()[0] < free_before
        stream = BackgroundStream(server.url, "/v1/completions", prompt="a", max_tokens=60000, ignore_eos=True)
        stream.wait_for_events(3)
        killed_at = time.monotonic()
        server.kill(server.engine_pids()[0])
        assert stream.result(5).error is not None
        assert stream.ended_at - killed_at < 5
        assert server.process.wait(10) == 1
    wait_for(lambda: torch.cuda.mem_get_info()[0] >= free_before - 2**28, 10, "free device memory")


def test_more_engine_cores_than_gpus(model: Path) -> None:
    count = torch.cuda.device_count()
    done = run_serve(str(model), "-dp", str(count + 1), "--port", "0")
    assert done.returncode == 1
    assert f"use at most --data-parallel-size {count}" in done.stderr.splitlines()[-1]


def test_share_that_is_not_free(model: Path) -> None:
    """The other half of the device is taken by this test."""
    free, total = torch.cuda.mem_get_info()
    taken = torch.empty(free - int(0.3 * total), dtype=torch.uint8, device="cuda")
    try:
        done = run_serve(str(model), "--gpu-memory-utilization", "0.9", "--port", "0", timeout_s=120)
    finally:
        del taken
        torch.cuda.empty_cache()
    assert done.returncode == 1
    assert re.search(r"free the device or pass --gpu-memory-utilization 0\.[12]\d?$", done.stderr.splitlines()[-1])


def test_llm(model: Path, cpu_texts: list[str]) -> None:
    with LLM(model, dtype="float32", gpu_memory_utilization=SHARE) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=LIMIT, ignore_eos=True))
    assert [output.outputs[0].text for output in outputs] == cpu_texts
