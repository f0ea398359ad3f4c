"""`tokenmill bench`: the command line as users type it."""

import json
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.scripted_server import DONE, Reply, Script, ScriptedServer, Seen, text_event, usage_event
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench import cli

Start = Callable[[Script], ScriptedServer]

TRACE = ["--dataset-name", "timed_trace", "--dataset-path", "trace.jsonl"]
MM = ["--dataset-name", "random-mm"]
IDS = ["--prompt-format", "ids", "--vocab-size", "500"]


def answer(seen: Seen, index: int) -> Reply:
    if seen.path == "/v1/models":
        return Reply([(0, b'{"data": [{"id": "m"}]}')], framing="length")
    return Reply([(0.01, text_event("a")), (0.01, text_event("b", "length")), (0, usage_event(8, 2)), (0, DONE)])


def test_serve_with_every_flag(
    scripted_server: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    server = scripted_server(answer)
    arguments = [
        *["serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions", "--model", "m"],
        *["--dataset-name", "random", "--num-prompts", "6", "--random-input-len", "8", "--random-output-len", "2"],
        *["--random-range-ratio", "0.25", "--random-prefix-len", "3", *IDS, "--request-rate", "100"],
        *["--burstiness", "2", "--max-concurrency", "2", "--num-warmups", "1", "--seed", "3", "--ignore-eos"],
        *[
            "--percentile-metrics",
            "ttft,e2el",
            "--metric-percentiles",
            "50,99.5",
            "--goodput",
            "ttft:5000",
            "e2el:9000",
        ],
        *["--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json", "--disable-tqdm"],
        *["--extra-body", '{"top_k": 3}', "--header", "X-Team=a=b"],
    ]
    assert cli.main(arguments) == 0
    output = capsys.readouterr().out
    assert "P99.5 E2EL (ms):" in output
    assert "TPOT" not in output
    assert "Request goodput (req/s):" in output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["completed"] == 6
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    posts = [seen for seen in server.seen if seen.method == "POST"]
    assert len(posts) == 7
    assert {seen.headers["authorization"] for seen in posts} == {"Bearer from-environment"}
    assert {seen.headers["x-team"] for seen in posts} == {"a=b"}
    assert all(seen.body["top_k"] == 3 and seen.body["ignore_eos"] for seen in posts)
    assert all(9 <= len(seen.body["prompt"]) <= 13 for seen in posts)


def test_host_and_port(scripted_server: Start) -> None:
    server = scripted_server(answer)
    where = ["--host", "localhost", "--port", str(server.port), "--api-key", "given"]
    assert cli.main(["serve", *where, "--num-prompts", "2", "--input-len", "4", "--output-len", "2", *IDS]) == 0
    assert server.seen[-1].headers["authorization"] == "Bearer given"


def test_images_in_chats(
    scripted_server: Start, word_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = scripted_server(answer)
    arguments = [
        *["serve", "--base-url", server.url, *MM, "--num-prompts", "5", "--num-warmups", "2", "--input-len", "4"],
        *["--tokenizer", str(word_tokenizer), "--random-mm-base-items-per-request", "3", "--seed", "7"],
        *["--random-mm-bucket-config", "{(16, 8, 1): 0.5, (4, 4, 1): 0.5, (4, 4, 2): 0}"],
        *["--random-mm-repeat-share", "0.4", "--random-mm-format", "png", "--result-filename", "out.json"],
    ]
    assert cli.main([*arguments, "--result-dir", str(tmp_path)]) == 0
    posts = [seen for seen in server.seen if seen.method == "POST"]
    assert {seen.path for seen in posts} == {"/v1/chat/completions"}
    contents = [seen.body["messages"][0]["content"] for seen in posts]
    assert all([part["type"] for part in content] == ["text", *["image_url"] * 3] for content in contents)
    urls = [[part["image_url"]["url"] for part in content[1:]] for content in contents]
    assert all(url.startswith("data:image/png;base64,") for each in urls for url in each)
    # The warm-up, whose order of arrival is anybody's, shares nothing with what is measured.
    warmup, measured = ({url for each in part for url in each} for part in (urls[:2], urls[2:]))
    assert not warmup & measured

    result = json.loads((tmp_path / "out.json").read_text())
    sent = [url for each in urls[2:] for url in each]
    assert result["total_images"] == 15
    assert result["total_different_images"] == len(measured) < 15
    assert result["total_image_bytes"] == sum(len(b64decode(url.partition(",")[2])) for url in sent)
    assert result["total_sent_bytes"] == sum(int(seen.headers["content-length"]) for seen in posts[2:])
    assert 15 * 16 <= result["total_image_pixels"] <= 15 * 128
    assert "Sent (MB):" in capsys.readouterr().out


def test_a_trace_is_sent_at_its_times(scripted_server: Start, tmp_path: Path) -> None:
    rows = [(5.3, 33, [1, 2, 3]), (5.0, 32, [1, 2]), (5.1, 7, [9])]
    trace = tmp_path / "trace.jsonl"
    lines = [json.dumps({"t": time, "input_length": n, "output_length": 2, "hash_ids": ids}) for time, n, ids in rows]
    trace.write_text("\n".join(lines))
    server = scripted_server(answer)
    arguments = [
        *["serve", "--base-url", server.url, "--dataset-name", "timed_trace", "--dataset-path", str(trace)],
        *["--self-timed", "--timed-trace-label-timestamp", "t", *IDS, "--num-warmups", "1"],
        *["--result-filename", "out.json", "--result-dir", str(tmp_path)],
    ]
    assert cli.main(arguments) == 0
    warmup, *measured = [seen for seen in server.seen if seen.method == "POST"]
    prompts = [seen.body["prompt"] for seen in measured]
    assert [len(prompt) for prompt in prompts] == [32, 7, 33]
    assert prompts[0] == prompts[2][:32]
    assert not set(map(tuple, prompts)) & {tuple(warmup.body["prompt"])}
    assert measured[2].arrived_s - warmup.arrived_s >= 0.3
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["duration"] >= 0.3
    assert result["num_prompts"] == result["completed"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--dataset-name", "sonnet"], "invalid choice: 'sonnet' (choose from random, random-mm, sharegpt, "),
        (["serve", "--custom-output-len", "0"], "at least 1, or -1"),
        (["serve", "--request-rate", "0"], "'0' is not a number above 0"),
        (["serve", "--request-rate", "nan"], "'nan' is not a number above 0"),
        (["serve", "--random-range-ratio", "1"], "from 0 to below 1"),
        (["serve", "--num-prompts", "none"], "at least 1"),
        (["serve", "--percentile-metrics", "ttft,latency"], "choice of ttft, tpot, itl, e2el"),
        (["serve", "--metric-percentiles", "101"], "from 0 to 100"),
        (["serve", "--goodput", "itl:5"], "with a name of ttft, tpot, e2el"),
        (["serve", "--goodput", "ttft"], "NAME:MILLISECONDS"),
        (["serve", "--extra-body", "[1]"], "is not a JSON object"),
        (["serve", "--header", "novalue"], "NAME=VALUE"),
        (["serve", "--random-mm-sizes", "big"], "sizes such as 256x256"),
        (["serve", "--random-mm-bucket-config", "{(64, 64, 8): 1.0}"], "videos are not drawn"),
        (["serve", "--random-mm-repeat-share", "1.5"], "from 0 to 1"),
        (["serve", "--no-such-flag"], "unknown argument --no-such-flag"),
        (["latency", "--num-iters", "0"], "at least 1"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err.replace("'random'", "random").replace("'random-mm'", "random-mm").replace(
        "'sharegpt'", "sharegpt"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--backend", "openai-chat", "--prompt-format", "ids"], "needs --backend openai"),
        (["serve", "--vocab-size", "10"], "is for --prompt-format ids"),
        (["serve", "--random-mm-format", "png"], "--random-mm-format needs --dataset-name random-mm"),
        (["serve", "--dataset-name", "random-mm", "--backend", "openai"], "needs --backend openai-chat"),
        (["serve", *MM, "--random-mm-sizes", "8x8", "--random-mm-bucket-config", "{(8, 8, 1): 1}"], "say the same"),
        (["serve", "--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path FILE"),
        (["serve", "--dataset-path", "x"], "--dataset-path needs --dataset-name sharegpt, custom or timed_trace"),
        (["serve", "--prefix-repetition-num-prefixes", "2"], "needs --dataset-name prefix_repetition"),
        (["serve", "--timed-trace-label-timestamp", "t"], "--timed-trace-label-timestamp needs --dataset-name timed"),
        (["serve", "--self-timed"], "--self-timed needs --dataset-name timed_trace"),
        (["serve", *TRACE, "--self-timed", "--request-rate", "1"], "--self-timed contradicts --request-rate"),
        (["throughput", "--no-such-engine-flag", "1"], "unknown flag --no-such-engine-flag"),
        (["latency", "--max-num-seqs", "-4"], "--max-num-seqs must be"),
    ],
)
def test_contradictions_are_explained(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cli.main(arguments)
