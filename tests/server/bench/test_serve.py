import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_server import DONE, Reply, Script, ScriptedServer, Seen, event, text_event, usage_event
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench import serve
from tokenmill_server.bench.serve import ServeBench
from tokenmill_server.bench.workload import RandomShape

Start = Callable[[Script], ScriptedServer]
MODELS = Reply([(0, b'{"object": "list", "data": [{"id": "listed-model", "object": "model"}]}')], framing="length")


def stream(delays_s: list[float], usage: int | None = None, opening: Sequence[Any] = ()) -> Reply:
    """One output chunk after each delay; `opening` are pieces before them."""
    finishes = [None] * (len(delays_s) - 1) + ["length"]
    pieces = [(delay_s, text_event("x", finish)) for delay_s, finish in zip(delays_s, finishes, strict=True)]
    if usage is not None:
        pieces.append((0, usage_event(6, usage)))
    return Reply([*opening, *pieces, (0, DONE)])


def answer_with(reply: Callable[[int], Reply]) -> Script:
    """Model list and health beside the completions, which `reply` numbers from 0."""
    posts = iter(range(10**6))

    def script(seen: Seen, index: int) -> Reply:
        if seen.path == "/v1/models":
            return MODELS
        return Reply(framing="length") if seen.path == "/health" else reply(next(posts))

    return script


def bench_for(server: ScriptedServer, **changes: Any) -> ServeBench:
    base = ServeBench(
        base_url=server.url,
        backend="openai",
        endpoint="/v1/completions",
        model=None,
        tokenizer=None,
        shape=RandomShape(6, 4),
        num_prompts=4,
        prompt_format="ids",
        vocab_size=1000,
        show_progress=False,
    )
    return dataclasses.replace(base, **changes)


def posts(server: ScriptedServer) -> list[Seen]:
    return [seen for seen in server.seen if seen.method == "POST"]


def run_to_json(bench: ServeBench, folder: Path) -> dict[str, Any]:
    code = serve.run(dataclasses.replace(bench, save_result=True, result_dir=folder, result_filename="r.json"))
    result: dict[str, Any] = json.loads((folder / "r.json").read_text())
    assert code == (0 if result["completed"] else 1)
    return result


def test_scripted_delays_come_out_as_reported(scripted_server: Start, tmp_path: Path) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.10, 0.04, 0.06], usage=5)))
    bench = bench_for(
        server,
        max_concurrency=1,
        percentiles=(50.0, 99.0),
        goals_ms={"ttft": 1000.0, "e2el": 100.0},
        num_prompts=6,
        save_detailed=True,
    )
    result = run_to_json(bench, tmp_path)

    assert result["completed"] == 6
    assert result["total_input_tokens"] == 36
    assert result["total_output_tokens"] == 30
    # The server measured how long its own delays really took. The client adds little to them, unless the machine has
    # other work.
    ttfts_s = result["ttfts"]
    e2els_s = [ttft_s + sum(gaps_s) for ttft_s, gaps_s in zip(ttfts_s, result["itls"], strict=True)]
    for measured_s, piece in ((ttfts_s, 0), (e2els_s, 2)):
        known_s = [seen.sent_s[piece] - seen.arrived_s for seen in posts(server)]
        assert 0.0 <= min(ours - theirs for ours, theirs in zip(measured_s, known_s, strict=True)) <= 0.09
    assert result["mean_ttft_ms"] == pytest.approx(sum(ttfts_s) / 6 * 1e3)
    assert result["mean_e2el_ms"] == pytest.approx(sum(e2els_s) / 6 * 1e3)
    assert result["mean_tpot_ms"] == pytest.approx((result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 4)
    assert result["mean_itl_ms"] == pytest.approx((result["mean_e2el_ms"] - result["mean_ttft_ms"]) / 2)
    assert result["duration"] >= 6 * 0.2
    assert result["output_throughput"] == pytest.approx(30 / result["duration"])
    assert result["request_goodput"] == 0
    assert result["model_id"] == "listed-model"


def test_requests_say_what_was_asked(scripted_server: Start) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.0])))
    bench = bench_for(server, ignore_eos=True, extra_body={"top_k": 5, "temperature": 0.5}, headers={"X-Team": "a"})
    assert serve.run(bench) == 0
    body = posts(server)[0].body
    prompt = body.pop("prompt")
    assert len(prompt) == 6
    assert all(0 <= token_id < 1000 for token_id in prompt)
    assert body == {
        "model": "listed-model",
        "max_tokens": 4,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 5,
    }
    assert posts(server)[0].headers["x-team"] == "a"


def test_concurrency_is_limited(scripted_server: Start) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.02, 0.02], opening=[server.once_open(3)])))
    assert serve.run(bench_for(server, num_prompts=12, max_concurrency=3)) == 0
    assert server.max_open == 3
    assert len({seen.connection for seen in posts(server)}) == 3


def test_without_a_limit_all_are_open_at_once(scripted_server: Start) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.02], opening=[server.once_open(12)])))
    assert serve.run(bench_for(server, num_prompts=12)) == 0
    assert server.max_open == 12


def test_request_rate_spreads_arrivals(scripted_server: Start, tmp_path: Path) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.0])))
    result = run_to_json(bench_for(server, num_prompts=20, request_rate=20.0, burstiness=50.0), tmp_path)
    arrivals = sorted(seen.arrived_s for seen in posts(server))
    assert arrivals[-1] - arrivals[0] >= 0.25  # 0.95, but the first may be late on a busy machine
    assert result["duration"] >= 1.0 - 1e-6
    assert result["request_rate"] == 20.0


def test_warmups_are_sent_first_and_not_counted(scripted_server: Start, tmp_path: Path) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.0])))
    result = run_to_json(bench_for(server, num_warmups=3), tmp_path)
    assert result["completed"] == 4
    assert len(posts(server)) == 7
    assert len({tuple(seen.body["prompt"]) for seen in posts(server)}) == 7
    last_warmup_s = max(seen.finished_s for seen in posts(server)[:3])
    assert all(seen.arrived_s >= last_warmup_s for seen in posts(server)[3:])


def test_failures_are_counted_and_told(
    scripted_server: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = Reply([(0, b'{"error": {"message": "overloaded"}}')], status=503, framing="length")
    server = scripted_server(answer_with(lambda index: refusal if index % 2 else stream([0.0, 0.0])))
    result = run_to_json(bench_for(server, max_concurrency=1), tmp_path)
    assert (result["completed"], result["failed"]) == (2, 2)
    captured = capsys.readouterr()
    assert "2 of 4 requests failed; the first: HTTP 503: " in captured.err
    assert "overloaded" in captured.err
    assert "Failed requests:                         2\n" in captured.out


def test_exit_code_when_nothing_worked(scripted_server: Start) -> None:
    server = scripted_server(answer_with(lambda index: Reply(status=500, framing="length")))
    assert serve.run(bench_for(server)) == 1


def test_tokens_are_counted_by_chunk_without_usage_and_tokenizer(scripted_server: Start, tmp_path: Path) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.0, 0.0, 0.0])))
    assert run_to_json(bench_for(server), tmp_path)["total_output_tokens"] == 12


def test_chat(scripted_server: Start, tmp_path: Path, word_tokenizer: Path) -> None:
    def reply(index: int) -> Reply:
        deltas = [({"role": "assistant", "content": ""}, 0.0), ({"content": "w1 w2"}, 0.1), ({"content": " w3"}, 0.05)]
        pieces = [(delay_s, event({"choices": [{"delta": delta}]})) for delta, delay_s in deltas]
        return Reply([*pieces, (0.0, event({"choices": [{"delta": {}, "finish_reason": "stop"}]})), (0.0, DONE)])

    server = scripted_server(answer_with(reply))
    bench = bench_for(
        server,
        backend="openai-chat",
        endpoint="/v1/chat/completions",
        tokenizer=str(word_tokenizer),
        prompt_format="text",
        vocab_size=None,
        save_detailed=True,
    )
    result = run_to_json(bench, tmp_path)
    assert result["median_ttft_ms"] >= 100
    assert result["total_output_tokens"] == 12
    assert result["generated_texts"] == ["w1 w2 w3"] * 4
    assert [len(gaps) for gaps in result["itls"]] == [1] * 4
    body = posts(server)[0].body
    assert body["max_completion_tokens"] == 4
    assert len(body["messages"][0]["content"].split()) == 6


def test_ready_check_waits(scripted_server: Start) -> None:
    def script(seen: Seen, index: int) -> Reply:
        if seen.path == "/health":
            return Reply(status=200 if index > 3 else 503, framing="length")
        return MODELS if seen.path == "/v1/models" else stream([0.0])

    server = scripted_server(script)
    assert serve.run(bench_for(server, ready_timeout_s=120.0)) == 0
    first_post = next(index for index, seen in enumerate(server.seen) if seen.method == "POST")
    assert [seen.path for seen in server.seen[:first_post]].count("/health") >= 2


def test_ready_check_gives_up(scripted_server: Start) -> None:
    server = scripted_server(lambda seen, index: Reply(status=503, framing="length"))
    with pytest.raises(ConfigError, match=r"ready-check-timeout-sec 0\.3"):
        serve.run(bench_for(server, ready_timeout_s=0.3))


def test_nobody_listens(scripted_server: Start) -> None:
    server = scripted_server(lambda seen, index: MODELS)
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:1 "):
        serve.run(bench_for(server, base_url="http://127.0.0.1:1"))


def test_server_without_models(scripted_server: Start) -> None:
    server = scripted_server(lambda seen, index: Reply([(0, b'{"data": []}')], framing="length"))
    with pytest.raises(ConfigError, match="names no model"):
        serve.run(bench_for(server))


def test_default_file_name(scripted_server: Start, tmp_path: Path) -> None:
    server = scripted_server(answer_with(lambda index: stream([0.0])))
    bench = bench_for(server, model="org/name", save_result=True, result_dir=tmp_path / "new", max_concurrency=2)
    assert serve.run(bench) == 0
    names = [path.name for path in (tmp_path / "new").iterdir()]
    assert len(names) == 1
    assert names[0].startswith("openai-infqps-concurrency2-name-")
    assert math.isfinite(json.loads((tmp_path / "new" / names[0]).read_text())["mean_ttft_ms"])
