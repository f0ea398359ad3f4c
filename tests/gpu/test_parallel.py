"""Models that two GPUs have between them (`-tp 2`): the answers of one GPU, with `LLM` and over HTTP; refusals; ends.

Rank 1 samples for itself, and nobody asks it: had it chosen another token than rank 0, its keys and values would be
those of another text, and so would be what both make of it from then on.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.offline import Run, run_offline
from tests.support.server import Server, run_serve, start_server, wait_for
from tests.support.streams import BackgroundStream, at_once
from tests.support.tiny_models import cached_tiny_model
from tokenmill import SamplingParams
from tokenmill_server.llm_outputs import RequestOutput

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

BLOCK_SIZE = 16
WAIT_S = 60.0
SHARE = 0.1
LENGTHS = [64, 2, 15, 16, 77, 31, 40, 17, 300, 5, 3, 1]
NUM_TOKENS = 40
FLAGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": "256M",
}
CROWDED: dict[str, Any] = {
    "kv_cache_memory_bytes": None,
    "num_gpu_blocks_override": 22,
    "max_model_len": 352,
    "max_num_batched_tokens": 48,
    "enforce_eager": True,
}
"""Prompts are cut, requests preempt each other, and all steps run kernel by kernel."""
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "one": {},
    "graphs": TWO,
    "nccl": TWO | {"disable_custom_all_reduce": True},
    "crowded": TWO | CROWDED,
    "one bfloat16": {"dtype": "bfloat16"},
    "bfloat16": TWO | {"dtype": "bfloat16"},
}


def llama() -> Path:
    return cached_tiny_model("llama", max_position_embeddings=65536)


def qwen() -> Path:
    """With biases, one key-value head for all, which both workers hold, and a vocabulary that does not divide."""
    return cached_tiny_model("qwen2", num_key_value_heads=1, vocab_size=509, tie_word_embeddings=True)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(3, 500, length).tolist() for length in LENGTHS]


def sampling() -> list[SamplingParams]:
    """One for each prompt: what graphs can sample and what they cannot."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1, "top_p": 0.9},
        {"temperature": 0.8, "seed": 2, "top_k": 20, "frequency_penalty": 0.5},
    ]
    return [SamplingParams(**common, **kinds[index % len(kinds)]) for index in range(len(LENGTHS))]


@cache
def run(variant: str, model: Callable[[], Path] = llama) -> Run:
    flags = {name: value for name, value in (FLAGS | VARIANTS[variant]).items() if value is not None}
    return run_offline(prompts(), sampling(), model=model(), **flags)


def scores(output: RequestOutput) -> NDArray[np.float64]:
    """Log-probabilities of the prompt's tokens, given those before them, if they were asked for."""
    if output.prompt_logprobs is None:
        return np.zeros(0)
    known = zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
    return np.array([row[token].logprob for row, token in known if row is not None])


def check_same(ours: Run, expected: Run) -> None:
    """The same tokens, and log-probabilities up to rounding."""
    assert ours.token_ids == expected.token_ids
    for output, other in zip(ours.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(scores(output), scores(other), atol=1e-3)
        for row, known in zip(output.outputs[0].logprobs or [], other.outputs[0].logprobs or [], strict=True):
            values = [{token: entry.logprob for token, entry in one.items()} for one in (row, known)]
            assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.mark.parametrize("variant", ["graphs", "nccl", "crowded"])
def test_tokens_are_those_of_one_gpu_in_float32(variant: str) -> None:
    """Greedy and seeded ones, at the same time, in steps with prompts of many lengths."""
    ours = run(variant)
    check_same(ours, run("one"))
    assert (ours.num_preemptions > 0) == (variant == "crowded")
    assert "cannot map" not in ours.log
    if variant != "crowded":
        assert "captured" in ours.log


def test_heads_and_entries_that_do_not_divide() -> None:
    check_same(run("graphs", qwen), run("one", qwen))


def test_bfloat16_is_about_as_near_to_float32_as_that_of_one_gpu() -> None:
    """Of prompts, which are the same whatever is chosen after them."""

    def distance(variant: str) -> NDArray[np.float64]:
        pairs = zip(run(variant).outputs, run("one").outputs, strict=True)
        return np.concatenate([np.abs(scores(ours) - scores(exact)) for ours, exact in pairs])

    ours, alone = distance("bfloat16"), distance("one bfloat16")
    text = f"two GPUs: mean {ours.mean():.4f}, largest {ours.max():.4f}; one: {alone.mean():.4f}, {alone.max():.4f}"
    assert len(ours) > 400
    assert ours.mean() < 1.75 * alone.mean() + 1e-3, text
    assert ours.max() < 2 * alone.max() + 0.05, text


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--dtype", "float32", "--gpu-memory-utilization", str(SHARE), "--max-num-seqs", "16", "-asc", "1")
    with start_server(str(llama()), *flags, "--max-num-batched-tokens", "512", "-tp", "2", wait=False) as server:
        server.wait_until_ready(WAIT_S)
        yield server


def device_files(pid: int) -> set[str]:
    """Of GPUs, that a process has open."""
    files = set()
    for link in Path("/proc", str(pid), "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files.add(os.readlink(link))
    return {file for file in files if file.startswith("/dev/nvidia")}


def test_requests_at_once_and_prefixes(server: Server) -> None:
    texts = [f"{number} mills ground words" for number in range(16)]
    fields: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
    alone = [server.text(text, **fields) for text in texts[::5]]
    together = at_once([lambda t=text: server.text(t, **fields) for text in texts])  # type: ignore[misc]
    assert together[::5] == alone
    prompt = [3 + 13 * position % 400 for position in range(4 * BLOCK_SIZE)]
    replies = [server.complete(prompt, **fields) for _ in range(2)]
    assert [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies] == [0, 3 * BLOCK_SIZE]
    assert replies[0]["choices"][0]["text"] == replies[1]["choices"][0]["text"]


def test_workers_have_a_gpu_each_and_their_engine_core_none(server: Server) -> None:
    assert len(server.worker_pids()) == 2
    assert all(device_files(pid) for pid in server.worker_pids())
    assert not device_files(server.engine_pids()[0])
    for device in range(2):
        free, total = torch.cuda.mem_get_info(device)
        # Contexts are not part of the share, neither those of the workers nor that of this process.
        assert 0.9 * SHARE * total < total - free, f"GPU {device} has {free} of {total} bytes left"


def test_a_killed_worker_is_named_and_frees_both_gpus(server: Server) -> None:
    """The other one may wait for it inside of a kernel. The server is of no use afterwards, so this comes last."""
    stream = BackgroundStream(server.url, "/v1/completions", prompt="a", max_tokens=60000, ignore_eos=True)
    stream.wait_for_events(3)
    used = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    taken = [int(0.9 * SHARE * torch.cuda.mem_get_info(device)[1]) for device in range(2)]
    killed_at = time.monotonic()
    server.kill(server.worker_pids()[1])
    error = stream.result(WAIT_S).error
    assert error is not None
    assert error["code"] == "engine_dead"
    assert "worker 0.1 was killed" in error["message"]
    assert stream.ended_at - killed_at < 10
    assert server.process.wait(WAIT_S) == 1
    for device in range(2):
        wait_for(
            lambda device=device: torch.cuda.mem_get_info(device)[0] > used[device] + taken[device],  # type: ignore[misc]
            WAIT_S,
            f"free memory of GPU {device}",
        )


def test_what_cannot_be_shared_out_is_refused() -> None:
    count = torch.cuda.device_count()
    wide = cached_tiny_model("llama", num_attention_heads=32, num_key_value_heads=32, head_dim=2)
    refusals = {
        ("-tp", "32"): f"--tensor-parallel-size 32 needs 32 GPUs, {count} are visible; use at most",
        ("-tp", "3"): "does not fit LlamaForCausalLM with 32 attention heads",
        ("-dp", str(count), "-tp", "2"): f"need {2 * count} GPUs, {count} are visible; use sizes with a product of",
    }
    for flags, message in refusals.items():
        done = run_serve(str(wide), *flags, "--port", "0", timeout_s=30)
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]


def test_heads_that_do_not_divide_by_two() -> None:
    model = cached_tiny_model(
        "llama", num_attention_heads=9, num_key_value_heads=3, hidden_size=144, intermediate_size=288
    )
    done = run_serve(str(model), "-tp", "2", "--port", "0", timeout_s=30)
    assert done.returncode == 1
    assert "with 9 attention heads, 3 key-value heads; sizes that do: 1, 3" in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_gpus_and_two_engine_cores(tmp_path: Path) -> None:
    """Each worker of each engine core on another GPU; and four workers that share a head by twos."""
    fields: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    flags = ("--dtype", "float32", "--gpu-memory-utilization", str(SHARE), "--max-num-seqs", "16", "--enforce-eager")
    texts = []
    for sizes in (("-tp", "4"), ("-dp", "2", "-tp", "2")):
        with start_server(str(llama()), *flags, *sizes, wait=False) as server:
            server.wait_until_ready(WAIT_S)
            texts += [server.text("Once upon a time", **fields) for _ in range(2)]
            for device in range(4):
                free, total = torch.cuda.mem_get_info(device)
                assert total - free > 0.9 * SHARE * total, f"GPU {device} is not used"
    assert len(set(texts)) == 1
