"""Models whose layers lie in stages (`-pp`) answer as models in one piece do, also where stages are split (`-tp`)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.exposition import samples
from tests.support.offline import run_offline
from tests.support.server import Server, start_server, wait_for
from tests.support.streams import BackgroundStream, at_once, raw_request
from tests.support.tiny_models import cached_tiny_model
from tokenmill import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK_SIZE = 16
WAIT_S = 120.0
"""For whatever takes a moment on a machine that is not busy."""
TOLERANCE = 1e-3
"""Of log-probabilities."""
ENDLESS = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_p": 0.9, "top_k": 40, "n": 3},
    {"temperature": 0.7, "seed": 7, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"temperature": 0, "logit_bias": {"17": 4, "40": -100}, "min_tokens": 9, "stop": ["e"]},
    {"temperature": 0, "logprobs": 1, "prompt_logprobs": 2},
    {"temperature": 1.0, "seed": 8, "structured_outputs": {"regex": "([a-m] after that |[0-9 ]{3}){200}"}},
]


@pytest.fixture(scope="module")
def staged(tiny_model: Path) -> Iterator[Server]:
    """Two stages, the first one with two layers of three, of two workers each. What is killed comes back."""
    flags = ("-pp", "2", "-tp", "2", "--max-engine-restarts", "50", "--max-num-batched-tokens", "64")
    with start_server(str(tiny_model), *TINY_FLAGS, *flags, wait=False) as server:
        server.wait_until_ready(WAIT_S)
        yield server


def complete(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"max_tokens": 24, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return dict(response.json())


def wait_until_idle(server: Server) -> None:
    """Nothing runs, nothing waits, no KV block is in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_for(lambda: all(server.metric(name) == 0 for name in names), WAIT_S, "server without requests")


def test_all_workers_are_there_and_said_to_be(staged: Server) -> None:
    assert (len(staged.engine_pids()), len(staged.worker_pids())) == (1, 4)
    page = " ".join(samples(staged.http.get("/metrics").text))
    names = sorted(re.findall(r'process_open_fds\{process="worker (.*?)"\}', page))
    assert names == ["0.0", "0.1", "0.2", "0.3"]
    assert "-tp2-pp2-" in complete(staged, {"prompt": "Once"})["system_fingerprint"]


def test_answers_are_those_of_a_model_in_one_piece(staged: Server, tiny_server: Server) -> None:
    """Thirty requests at once: prompts of up to ten steps, streams of all kinds beside them."""
    text = "the mill turns as long as the river carries water to it and nobody stops the wheel, "
    requests = [
        {"prompt": (text * (1 + number // 2))[number % 7 :], **KINDS[number % len(KINDS)]} for number in range(30)
    ]
    whole = at_once([lambda r=request: complete(tiny_server, r) for request in requests])  # type: ignore[misc]
    found = at_once([lambda r=request: complete(staged, r) for request in requests])  # type: ignore[misc]
    for ours, theirs in zip(found, whole, strict=True):
        assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        assert len(ours["choices"]) == len(theirs["choices"])
        for choice, expected in zip(ours["choices"], theirs["choices"], strict=True):
            assert choice["text"] == expected["text"] != ""
            assert choice["finish_reason"] == expected["finish_reason"]
            check_logprobs(choice, expected)
    assert any(choice.get("prompt_logprobs") for answer in found for choice in answer["choices"])
    assert staged.metric("known_tokens_total") > 0
    wait_until_idle(staged)


def check_logprobs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Of outputs and prompts; numbers up to rounding. Of tokens that are as likely up to that, either may be named."""
    chosen, expected = ((choice.get("logprobs") or {}).get("token_logprobs", []) for choice in (ours, theirs))
    assert chosen == pytest.approx(expected, abs=TOLERANCE)
    rows, expected_rows = (choice.get("prompt_logprobs") or [] for choice in (ours, theirs))
    for row, expected_row in zip(rows, expected_rows, strict=True):
        values, wanted = (
            {token: entry["logprob"] for token, entry in (one or {}).items()} for one in (row, expected_row)
        )
        assert sorted(values.values()) == pytest.approx(sorted(wanted.values()), abs=TOLERANCE)
        named_by_both = values.keys() & wanted.keys()
        assert named_by_both or not wanted  # the prompt's own token is among them
        for token in named_by_both:
            assert values[token] == pytest.approx(wanted[token], abs=TOLERANCE)


def test_prefixes_are_found_in_every_stage(staged: Server, tiny_server: Server) -> None:
    prompt = [3 + 11 * position % 400 for position in range(4 * BLOCK_SIZE)]
    results = [complete(staged, {"prompt": prompt, "temperature": 0}) for _ in range(2)]
    cached = [result["usage"]["prompt_tokens_details"]["cached_tokens"] for result in results]
    assert cached == [0, 3 * BLOCK_SIZE]
    expected = complete(tiny_server, {"prompt": prompt, "temperature": 0})["choices"][0]["text"]
    assert {result["choices"][0]["text"] for result in results} == {expected}


def test_who_leaves_frees_blocks_in_all_stages(staged: Server) -> None:
    clients = [raw_request(staged.url, "/v1/completions", ENDLESS) for _ in range(6)]
    wait_for(lambda: staged.metric("num_requests_running") == 6, WAIT_S, "six running requests")
    for client in clients:
        client.close()
    wait_until_idle(staged)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_worker_of_any_stage_ends_the_engine_core_which_is_started_again(staged: Server, rank: int) -> None:
    wait_for(lambda: staged.http.get("/health").status_code == 200, WAIT_S, "a server that misses nobody")
    expected = complete(staged, {"prompt": "The mill", "temperature": 0})["choices"][0]["text"]
    lost = [BackgroundStream(staged.url, "/v1/completions", **ENDLESS, stream=kind) for kind in (True, False)]
    lost[0].wait_for_events(3)
    processes = [psutil.Process(pid) for pid in (*staged.engine_pids(), *staged.worker_pids())]
    restarts = staged.metric("engine_restarts_total")
    staged.kill(staged.worker_pids()[rank])
    for one in lost:
        answer = one.result(WAIT_S)
        error = answer.error or json.loads(answer.body)["error"]
        assert error["code"] == "engine_dead"
        assert f"worker 0.{rank} was killed" in error["message"]
    assert psutil.wait_procs(processes, timeout=WAIT_S)[1] == []
    wait_for(lambda: staged.metric("engine_restarts_total") == restarts + 1, WAIT_S, "a restart")
    wait_for(lambda: staged.http.get("/health").status_code == 200, WAIT_S, "the engine core that was lost", poll_s=0.2)
    assert complete(staged, {"prompt": "The mill", "temperature": 0})["choices"][0]["text"] == expected


def test_offline_in_a_cache_that_is_too_small() -> None:
    """One layer to a stage; requests preempt each other, prompts are cut: the same tokens."""
    model = cached_tiny_model("qwen2", vocab_size=509, tie_word_embeddings=True)
    flags: dict[str, Any] = {"model": model, "device": "cpu", "dtype": "float32", "max_model_len": 256}
    prompts = [[5 + number, *range(20, 40)] for number in range(6)]
    sampling = [
        SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.9, seed=3, max_tokens=100, ignore_eos=True, frequency_penalty=0.5),
    ] * 3
    expected = run_offline(prompts, sampling, **flags).token_ids
    crowded = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 16}
    run = run_offline(prompts, sampling, **flags, **crowded, pipeline_parallel_size=3)
    assert run.num_preemptions > 0
    assert run.token_ids == expected
