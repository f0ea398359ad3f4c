"""A KV pool of 24 blocks: requests must preempt each other, and nobody may notice in the text."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import PATIENCE_S, Server, check_error, start_server, wait_for
from tests.support.streams import at_once, read_stream

pytestmark = pytest.mark.slow

NUM_BLOCKS, BLOCK_SIZE = 24, 16
POOL_TOKENS = NUM_BLOCKS * BLOCK_SIZE
PROMPTS = [f"request number {number} asks the mill" for number in range(6)]
LIMIT = 100
VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalty": {"temperature": 0, "frequency_penalty": 1},
    "logprobs": {"temperature": 0, "logprobs": 1},
    "seeded": {"temperature": 0.8, "seed": 11},
    "structured": {"temperature": 0.8, "seed": 11, "structured_outputs": {"regex": "([a-m]|[0-9 ]{3}){200}"}},
}


@pytest.fixture(scope="module", params=["prefix-caching", "no-prefix-caching"])
def server(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    flags = (*TINY_FLAGS[:4], "--num-gpu-blocks-override", str(NUM_BLOCKS), "--block-size", str(BLOCK_SIZE))
    flags = (*flags, "--enable-per-request-metrics")
    caching = "--enable-prefix-caching" if request.param == "prefix-caching" else "--no-enable-prefix-caching"
    with start_server(str(tiny_model), *flags, caching) as server:
        server.remember_control()
        yield server


@pytest.mark.parametrize("variant", VARIANTS)
def test_six_requests_in_a_pool_for_three(server: Server, variant: str) -> None:
    fields = {"max_tokens": LIMIT, "ignore_eos": True, **VARIANTS[variant]}
    solo = [server.complete(prompt, **fields) for prompt in PROMPTS]

    def streamed(prompt: str) -> Callable[[], str]:
        return lambda: read_stream(server.url, "/v1/completions", {"prompt": prompt, **fields}).text()

    def preempt_each_other() -> bool:
        """All at once, which they may not be in the engine core if the machine lets some wait before."""
        preemptions = server.metric("num_preemptions_total")
        together = at_once([lambda p=prompt: server.complete(p, **fields) for prompt in PROMPTS])  # type: ignore[misc]
        check_equal(solo, together, variant)
        told = sum(reply["metrics"]["num_preemptions"] for reply in together)
        assert told == server.metric("num_preemptions_total") - preemptions
        return told > 0

    wait_for(preempt_each_other, PATIENCE_S, "preemption")
    assert at_once([streamed(prompt) for prompt in PROMPTS]) == [one["choices"][0]["text"] for one in solo]
    server.check_idle()
    server.check_alive()


def check_equal(solo: list[dict[str, Any]], together: list[dict[str, Any]], variant: str) -> None:
    for alone, crowded in zip(solo, together, strict=True):
        assert crowded["choices"][0]["text"] == alone["choices"][0]["text"]
        assert crowded["choices"][0]["finish_reason"] == "length"
        assert crowded["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
        assert crowded["usage"]["completion_tokens"] == LIMIT
        if variant == "logprobs":
            pairs = zip(
                crowded["choices"][0]["logprobs"]["token_logprobs"],
                alone["choices"][0]["logprobs"]["token_logprobs"],
                strict=True,
            )
            assert all(abs(first - second) < 1e-3 for first, second in pairs)


def test_the_warning_names_cause_remedy_and_count(server: Server) -> None:
    """As the user's guide promises; its running count agrees with the counter."""
    lines = [line for line in server.log.splitlines() if "total_cumulative_preemption_cnt" in line]
    assert lines
    for line in lines:
        assert "WARNING" in line
        assert re.search(r"recompute", line, re.IGNORECASE)
        assert "gpu_memory_utilization" in line or "gpu-memory-utilization" in line
    counts = [int(count) for count in re.findall(r"total_cumulative_preemption_cnt=(\d+)", server.log)]
    assert counts == sorted(counts)
    assert counts[-1] <= server.metric("num_preemptions_total")


def test_what_can_never_fit_is_answered_and_holds_nobody_up(server: Server) -> None:
    prompt = [7] * (POOL_TOKENS + 300)
    error = check_error(server.post("/v1/completions", prompt=prompt, max_tokens=4), 400)
    assert error["code"] == "context_length_exceeded"
    preemptions = server.metric("num_preemptions_total")

    def large() -> dict[str, Any]:
        return server.complete([7] * 300, max_tokens=POOL_TOKENS, ignore_eos=True)

    def small() -> dict[str, Any]:
        return server.complete("small", max_tokens=8, ignore_eos=True)

    results = at_once([large, small, small, small])
    assert results[0]["choices"][0]["finish_reason"] == "length"
    assert 300 + results[0]["usage"]["completion_tokens"] <= POOL_TOKENS
    assert all(result["usage"]["completion_tokens"] == 8 for result in results[1:])
    assert server.metric("num_preemptions_total") - preemptions <= 8
    server.check_idle()
    server.check_alive()
