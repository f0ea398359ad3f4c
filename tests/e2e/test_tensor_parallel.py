"""Models that are split over worker processes (`-tp`) answer as undivided ones do, whatever else is asked of them."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.exposition import samples
from tests.support.offline import run_offline
from tests.support.server import Server, run_serve, start_server, wait_for
from tests.support.smollm2 import CHAT_FILE, EOS_TOKEN_ID, Case, chosen_cases
from tests.support.streams import Stream, at_once, raw_request, read_stream
from tests.support.tiny_models import cached_tiny_model
from tokenmill import SamplingParams
from tokenmill_server.llm_outputs import RequestOutput

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
CASES = chosen_cases()
WAIT_S = 120.0
"""For whatever takes a moment on a machine that is not busy."""
OFFLINE: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
CROWDED: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 16, "max_model_len": 256}


@pytest.fixture(scope="module")
def smollm() -> Iterator[Server]:
    """The embedded model, with three query heads and one key-value head for each of three workers."""
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "512M", "-tp", "3")
    with start_server(*flags, wait=False) as server:
        server.wait_until_ready(timeout_s=WAIT_S)
        yield server


def pinned(server: Server, rank: int, **fields: Any) -> dict[str, Any]:
    """The answer of one engine core."""
    body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
    response = server.http.post("/v1/completions", json=body, headers={"X-Data-Parallel-Rank": str(rank)})
    assert response.status_code == 200, response.text
    return dict(response.json())


def answer(server: Server, case: Case) -> dict[str, Any]:
    """As many tokens as the reference; where that ends with the end token, there is room to go on after it."""
    room = 8 if case.greedy_ids[-1] == EOS_TOKEN_ID else 0
    limit = len(case.greedy_ids) + room
    return server.complete(case.prompt_ids, max_tokens=limit, return_token_ids=True)


def test_processes(smollm: Server, split_server: Server) -> None:
    assert (len(smollm.engine_pids()), len(smollm.worker_pids())) == (1, 3)
    assert len(split_server.engine_pids()) == 2
    pids = [pid for engine in (0, 1) for pid in split_server.worker_pids(engine)]
    assert len(set(pids)) == 4
    for server, names in ((smollm, ["0.0", "0.1", "0.2"]), (split_server, ["0.0", "0.1", "1.0", "1.1"])):
        page = samples(server.http.get("/metrics").text)
        assert sorted(re.findall(r'process_open_fds\{process="worker (.*?)"\}', " ".join(page))) == names


def test_greedy_ids_are_those_of_the_reference(smollm: Server) -> None:
    """Forty prompts at once, of 1 to 600 tokens; when some come again, whole blocks of them are known."""
    for repeated in (False, True):
        cases = CASES[::2] if repeated else CASES
        answers = at_once([lambda c=case: answer(smollm, c) for case in cases])  # type: ignore[misc]
        wrong = {}
        for case, reply in zip(cases, answers, strict=True):
            ids = reply["choices"][0]["token_ids"]
            if ids != case.greedy_ids:
                wrong[case.name] = (ids, case.greedy_ids)
        assert not wrong
        if repeated:
            found = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in answers]
            assert found == [(len(case.prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE for case in cases]
            assert sum(found) > 1000
    wait_until_idle(smollm)


def test_chats_stream(smollm: Server) -> None:
    """The text and the log-probabilities of the reference model, or how they begin, and what they come from."""
    limit = 40

    def ask(case: dict[str, Any]) -> Stream:
        messages = [{"role": "user", "content": case["prompt"]}]
        fields = {
            "messages": messages,
            "temperature": 0,
            "max_tokens": min(limit, len(case["fp32_ids"])),
            "logprobs": True,
        }
        return read_stream(smollm.url, "/v1/chat/completions", fields)

    cases = json.loads(CHAT_FILE.read_text())
    for case, stream in zip(cases, at_once([lambda c=case: ask(c) for case in cases]), strict=True):  # type: ignore[misc]
        assert stream.done
        text = stream.text()
        assert case["fp32_text"].startswith(text)
        assert text == case["fp32_text"] or len(case["fp32_ids"]) > limit
        entries = [entry for choice in stream.choices() for entry in (choice.get("logprobs") or {}).get("content", [])]
        expected = case["fp32_logprob"][:limit]
        assert [entry["logprob"] for entry in entries] == pytest.approx(expected, abs=2e-3)
        fingerprints = {event["system_fingerprint"] for event in stream.events if "system_fingerprint" in event}
        assert all("-tp3-" in fingerprint for fingerprint in fingerprints)
        assert len(fingerprints) == 1


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 1.3, "seed": 6, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 3},
    "penalties": {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "edited": {"logit_bias": {"17": 4, "40": -100}, "min_tokens": 9, "bad_words": ["the"], "stop": ["e"]},
    "logprobs": {"logprobs": 3},
    "prompt-logprobs": {"logprobs": 1, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_answers_are_those_of_an_undivided_model(
    split_server: Server, tiny_server: Server, kind: str, rank: int
) -> None:
    fields = {"prompt": f"Once upon a {kind}", **KINDS[kind]}
    split, whole = pinned(split_server, rank, **fields), pinned(tiny_server, 0, **fields)
    assert all(choice["text"] for choice in whole["choices"])
    check_alike(split["choices"], whole["choices"])


def check_alike(ours: Any, theirs: Any) -> None:
    """The same structure with the same values, numbers up to rounding."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            check_alike(value, theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for value, other in zip(ours, theirs, strict=True):
            check_alike(value, other)
    else:
        assert ours == (pytest.approx(theirs, abs=1e-3) if isinstance(ours, float) else theirs)


def test_prefixes_are_found_in_the_workers_that_have_them(split_server: Server, tiny_server: Server) -> None:
    prompt = [3 + 11 * position % 400 for position in range(4 * BLOCK_SIZE)]
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = [split_server.metric(name) for name in names]
    results = [pinned(split_server, rank, prompt=prompt) for rank in (0, 0, 1, 0)]
    cached = [result["usage"]["prompt_tokens_details"]["cached_tokens"] for result in results]
    assert cached == [0, 3 * BLOCK_SIZE, 0, 3 * BLOCK_SIZE]
    assert {result["choices"][0]["text"] for result in results} == {
        pinned(tiny_server, 0, prompt=prompt)["choices"][0]["text"]
    }
    after = [split_server.metric(name) for name in names]
    assert [late - early for early, late in zip(before, after, strict=True)] == [4 * len(prompt), 6 * BLOCK_SIZE]


def test_counters_are_exact(split_server: Server, tiny_server: Server) -> None:
    """Each series is there once, whatever the number of workers."""
    wait_until_idle(split_server)
    names = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    before = [split_server.metric(name) for name in names]
    limits = [1, 2, 3, 5, 8, 13, 21, 34] * 4
    prompts = [f"{number} mills" for number in range(len(limits))]

    def complete(server: Server) -> list[dict[str, Any]]:
        calls = [
            lambda p=prompt, n=limit: server.complete(p, max_tokens=n, ignore_eos=True)  # type: ignore[misc]
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        return at_once(calls)

    replies, expected = complete(split_server), complete(tiny_server)
    texts = [[reply["choices"][0]["text"] for reply in answers] for answers in (replies, expected)]
    assert texts[0] == texts[1]
    wait_until_idle(split_server)
    after = [split_server.metric(name) for name in names]
    num_prompt_tokens = sum(reply["usage"]["prompt_tokens"] for reply in expected)
    counted = [late - early for early, late in zip(before, after, strict=True)]
    assert counted == [num_prompt_tokens, sum(limits), len(limits)]
    samples(split_server.http.get("/metrics").text)


def test_who_leaves_frees_blocks_on_all_workers(split_server: Server) -> None:
    fields = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}
    clients = [raw_request(split_server.url, "/v1/completions", fields) for _ in range(6)]
    wait_for(lambda: split_server.metric("num_requests_running") == 6, WAIT_S, "six running requests")
    for client in clients:
        client.close()
    wait_until_idle(split_server)


def wait_until_idle(server: Server) -> None:
    """Nothing runs, nothing waits, no KV block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_for(lambda: all(server.metric(name) == 0 for name in names), WAIT_S, "server without requests")


PROMPTS = [[5 + number, *range(20, 40)] for number in range(6)]
SAMPLING = [
    SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1, prompt_logprobs=1),
    SamplingParams(temperature=0.9, seed=3, max_tokens=100, ignore_eos=True, frequency_penalty=0.5),
] * 3


@dataclass(frozen=True)
class Offline:
    """A model for `LLM`, and what is told of its workers."""

    model: Callable[[], Path]
    flags: dict[str, Any]


def llama() -> Path:
    return cached_tiny_model("llama")


def qwen() -> Path:
    """With biases, two key-value heads for four query heads, and a vocabulary that divides by nothing."""
    return cached_tiny_model("qwen2", vocab_size=509, tie_word_embeddings=True)


@cache
def undivided(model: Path) -> list[RequestOutput]:
    """Outputs of one worker with room for all."""
    return run_offline(PROMPTS, SAMPLING, model=model, **OFFLINE).outputs


OFFLINE_CASES = {
    "two": Offline(llama, {"tensor_parallel_size": 2}),
    "four-synchronous": Offline(qwen, {"tensor_parallel_size": 4, "async_scheduling": False}),
    "one-process": Offline(llama, {"distributed_executor_backend": "mp"}),
}


@pytest.mark.parametrize("name", OFFLINE_CASES)
def test_offline_in_a_cache_that_is_too_small(name: str) -> None:
    """Requests preempt each other, prompts are cut: the same tokens, and log-probabilities up to rounding."""
    case = OFFLINE_CASES[name]
    model = case.model()
    run = run_offline(PROMPTS, SAMPLING, model=model, **OFFLINE, **CROWDED, **case.flags)
    assert run.num_preemptions > 0
    check_outputs(run.outputs, undivided(model))


def check_outputs(ours: list[RequestOutput], theirs: list[RequestOutput]) -> None:
    for output, other in zip(ours, theirs, strict=True):
        choice, expected = output.outputs[0], other.outputs[0]
        assert choice.token_ids == expected.token_ids
        for rows, others in (
            (choice.logprobs, expected.logprobs),
            (output.prompt_logprobs, other.prompt_logprobs),
        ):
            assert (rows is None) is (others is None)
            for row, known in zip(rows or [], others or [], strict=True):
                assert (row is None) is (known is None)
                values = [{token: entry.logprob for token, entry in (one or {}).items()} for one in (row, known)]
                assert values[0] == pytest.approx(values[1], abs=1e-3)


def test_a_worker_that_cannot_start_says_why_once(tiny_model: Path) -> None:
    flags = ("--device", "cpu", "-tp", "2", "--kv-cache-memory-bytes", "10", "--port", "0")
    done = run_serve(str(tiny_model), *flags, timeout_s=WAIT_S)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert errors == done.stderr.splitlines()[-1:]
    assert "pass --kv-cache-memory-bytes" in errors[0]
