"""`tokenmill bench serve` with each kind of dataset against the embedded model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import Server
from tokenmill_server.bench import cli

pytestmark = pytest.mark.slow

SHORT = (
    *("--prefix-repetition-prefix-len", "64", "--prefix-repetition-suffix-len", "8"),
    *("--prefix-repetition-output-len", "2"),
)


def bench(server: Server, folder: Path, name: str, rows: Sequence[Any], *arguments: str) -> dict[str, Any]:
    """What a run with 6 requests tells. Each was answered."""
    path = folder / "data"
    path.write_text(json.dumps(rows) if name == "sharegpt" else "\n".join(map(json.dumps, rows)))
    where = [] if name == "prefix_repetition" else ["--dataset-path", str(path)]
    result = ["--result-dir", str(folder), "--result-filename", "out.json", "--save-detailed"]
    common = ["--base-url", server.url, "--num-prompts", "6", "--disable-shuffle", "--ignore-eos", "--disable-tqdm"]
    assert cli.main(["serve", "--dataset-name", name, *where, *common, *result, *arguments]) == 0
    told: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert (told["completed"], told["failed"]) == (6, 0)
    return told


def test_lengths_are_those_that_the_server_counts(smollm_server: Server, tmp_path: Path) -> None:
    conversations = [
        {"conversations": [{"value": f"What is the number {index} called in French?"}, {"value": "It is called six"}]}
        for index in range(4)
    ]
    custom = [{"prompt": f"The number {index} is é", "output_tokens": 2 + index} for index in range(6)]
    trace = [
        {"timestamp": 100 * index, "input_length": 40 + index, "output_length": 3, "hash_ids": [1, 2, 3]}
        for index in range(6)
    ]
    counted = smollm_server.metric("prompt_tokens_total"), smollm_server.metric("generation_tokens_total")
    for name, rows, arguments, lengths in (
        ("sharegpt", conversations, (), [4] * 6),
        ("custom", custom, ("--custom-output-len", "-1"), [2, 3, 4, 5, 6, 7]),
        ("prefix_repetition", [], ("--prefix-repetition-num-prefixes", "2", *SHORT), [2] * 6),
        ("timed_trace", trace, ("--self-timed", "--timed-trace-sec-multiplier", "0.001"), [3] * 6),
    ):
        told = bench(smollm_server, tmp_path, name, rows, *arguments)
        assert told["output_lens"] == lengths
        before, counted = (
            counted,
            (smollm_server.metric("prompt_tokens_total"), smollm_server.metric("generation_tokens_total")),
        )
        assert counted[0] - before[0] == told["total_input_tokens"] == sum(told["input_lens"])
        assert counted[1] - before[1] == told["total_output_tokens"] == sum(lengths)
        if name == "timed_trace":
            assert told["duration"] >= 0.5


def test_prefixes_are_found_in_the_cache(smollm_server: Server, tmp_path: Path) -> None:
    before = smollm_server.metric("prefix_cache_hits_total")
    one = ("--prefix-repetition-num-prefixes", "1", "--max-concurrency", "1")
    bench(smollm_server, tmp_path, "prefix_repetition", [], *SHORT, *one, "--seed", "5")
    assert smollm_server.metric("prefix_cache_hits_total") - before >= 5 * 48
