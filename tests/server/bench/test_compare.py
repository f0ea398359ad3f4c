"""Whole comparisons, with real processes on both sides: stubs that stream at a known pace, or ourselves."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.media_shapes import make_media_shape
from tests.support.processes import has_ended
from tests.support.scripted_peer import write_scripted_peer
from tests.support.server import wait_for
from tests.support.tiny_models import cached_tiny_model, tiny_config
from tokenmill_server.bench import cli, compare, compare_result, compare_sides

pytestmark = pytest.mark.slow

STUB = "{python} -m tests.support.stub_server --port {port}"
SIZES = ["--shrink", "64", "--time-limit", "800"]
TINY = ["--dtype", "float32"]
ON_CPU = "--device cpu --kv-cache-memory-bytes 32m"


@pytest.fixture(autouse=True)
def nothing_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests answer from everywhere once they answer."""
    monkeypatch.setattr(compare_sides, "_SETTLE_S", 0.0)


@pytest.fixture
def shape(tmp_path: Path) -> str:
    """A model folder with all that a comparison of stubs reads: no weights and no tokenizer."""
    folder = tmp_path / "shape"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config("llama")))
    return str(folder)


@pytest.fixture
def our_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our server is a stub that takes 2 ms for a token."""
    monkeypatch.setattr(compare, "_OUR_SERVER", f"{STUB} --token-ms 2")


def run(output: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    """The written result."""
    assert cli.main(["compare", "--output", str(output), "--peer-python", sys.executable, *arguments]) == status
    group = arguments[arguments.index("--group") + 1]
    result: dict[str, Any] = json.loads((output / f"result-{group}.json").read_text())
    return result


def figures(result: dict[str, Any], side: str, load: str, metric: str) -> list[float]:
    return [
        each["figures"][metric]
        for each in result["measurements"]
        if each["side"] == side and each["load"] == load and metric in each["figures"]
    ]


@pytest.mark.usefixtures("our_stub")
def test_servers(shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    peer = ["--peer", "Stub", "--peer-command", f"{STUB} --token-ms 20"]
    result = run(output, "--group", "online8b", "--model-8b", shape, "--rounds", "2", *SIZES, *peer)
    load = "8b 256 clients 1024/128"
    for side, token_ms in (("ours", 2), ("peer", 20)):
        assert len(figures(result, side, load, "p50_itl_ms")) == 2
        assert all(token_ms <= ttft_ms for ttft_ms in figures(result, side, load, "p50_ttft_ms"))
        assert figures(result, side, load, "completed") == [12, 12]
        assert figures(result, side, load, "total_output_tokens") == [24, 24]
        assert len(figures(result, side, "start", "empty_s")) == 1
    assert len(figures(result, "ours", "start", "kept_s")) == 1
    assert [session["side"] for session in result["sessions"]] == ["ours", "peer", "ours"]
    assert all(session["log_tail"] for session in result["sessions"])
    assert all("listening" in (output / name).read_text() for name in ("ours-8b.log", "peer-8b.log"))
    assert {session["version"] for session in result["sessions"]} == {"stub 1.0"}
    assert "bench serve" in result["measurements"][1]["command"]
    printed = capsys.readouterr().out
    assert "\n".join(result["table"]) in printed
    assert "| | Tokenmill | Stub | ratio |" in printed
    assert "sizes divided by 64" in printed
    assert sorted(path.name for path in output.iterdir()) == ["ours-8b.log", "peer-8b.log", "result-online8b.json"]


def test_images(tmp_path: Path) -> None:
    """Of a model that looks at them; what is told of the encoder comes from our server's metrics."""
    model = str(make_media_shape("tiny", tmp_path / "model"))
    sizes = ["--group", "media7b", "--model-vl7b", model, "--rounds", "1", "--shrink", "16", "--time-limit", "800"]
    result = run(tmp_path / "out", *sizes, *TINY, "--peer", "none", f"--args={ON_CPU}")
    load = "vl7b 64 clients 64/128 and an image"
    assert figures(result, "ours", load, "total_images") == [16, 16]
    assert figures(result, "ours", load, "total_output_tokens") == [128, 128]
    assert all(0 < share < 1 for share in figures(result, "ours", load, "encoder_share"))
    commands = [each["command"] for each in result["measurements"] if each["load"] == load]
    assert all("--random-mm-sizes 16x16..128x128" in command for command in commands)
    assert any("encoder's share of the steps" in line for line in result["table"])


@pytest.mark.usefixtures("our_stub")
def test_each_round_has_prompts_of_its_own(shape: str, tmp_path: Path) -> None:
    sizes = ["--group", "online8b", "--model-8b", shape, "--rounds", "3", *SIZES, "--select", "1 client"]
    result = run(tmp_path / "out", *sizes, "--peer", "none")
    commands = [each["command"] for each in result["measurements"] if each["load"] != "start"]
    seeds = [command.split("--seed ")[1].split()[0] for command in commands]
    assert len(seeds) == len(set(seeds)) == 3


@pytest.mark.usefixtures("our_stub")
def test_a_peer_that_does_not_start_is_told_and_ours_is_measured(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--group", "online1b", "--model-1b", shape, "--rounds", "1", *SIZES]
    result = run(tmp_path / "out", *arguments, "--peer-command", f"{STUB} --fail", status=1)
    assert len(result["failures"]) == 2
    assert "status 1 while starting" in result["failures"][0]
    for failure, variant in zip(result["failures"], ("default flags", "--api-server-count 4"), strict=True):
        assert failure.count("no room for the weights") == 1
        assert failure.startswith(f"peer, 1b, {variant}: the server ended")
    assert "--api-server-count" not in result["failures"][0]
    assert len(figures(result, "ours", "1b 256 clients 128/256", "output_throughput")) == 2
    assert "failed: peer, 1b, default flags" in capsys.readouterr().out


@pytest.mark.usefixtures("our_stub")
def test_rounds_that_do_not_fit_are_left_out(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_result, "_EXPECTED_START_S", {("ours", "8b"): 1.0, ("peer", "8b"): 798.0})
    arguments = ["--group", "online8b", "--model-8b", shape, "--rounds", "5", "--select", "1 client", *SIZES]
    result = run(tmp_path / "out", *arguments, "--peer-command", f"{STUB} --token-ms 1")
    assert len(figures(result, "ours", "8b 1 client 1024/128", "p50_ttft_ms")) == 1 + 2
    assert len(figures(result, "peer", "8b 1 client 1024/128", "p50_ttft_ms")) == 5
    assert "no time for round 2" in capsys.readouterr().err


@pytest.mark.usefixtures("our_stub")
def test_a_later_session_is_left_out_where_its_first_round_does_not_fit(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_result.Result, "round_s", lambda _self, session: 1e6 * session.rounds.start)
    arguments = ["--group", "online1b", "--model-1b", shape, "--rounds", "2", *SIZES]
    result = run(tmp_path / "out", *arguments, "--peer", "none")
    assert len(figures(result, "ours", "1b 256 clients 128/256", "completed")) == 2 + 2
    result = run(tmp_path / "beside", *arguments, "--peer-command", f"{STUB} --token-ms 1")
    assert len(figures(result, "ours", "1b 256 clients 128/256", "completed")) == 1 + 1
    assert "ours, 1b, --api-server-count 1: no time for round 2" in capsys.readouterr().err


@pytest.mark.usefixtures("our_stub")
def test_what_nobody_expected_of_a_side_is_told_and_the_other_goes_on(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = compare_sides.RunningServer.measure

    def broken(self: compare_sides.RunningServer, load: compare.Load, seed: int) -> compare_sides.Figures:
        if self.version == "stub 1.0" and load.concurrency == 1:
            raise KeyError("no such figure")
        return measure(self, load, seed)

    monkeypatch.setattr(compare_sides.RunningServer, "measure", broken)
    arguments = ["--group", "online8b", "--model-8b", shape, "--rounds", "1", *SIZES]
    result = run(tmp_path / "out", *arguments, "--peer-command", f"{STUB} --token-ms 1", status=1)
    assert [failure.splitlines()[-1] for failure in result["failures"]] == ["KeyError: 'no such figure'"] * 2
    for side in ("ours", "peer"):
        assert len(figures(result, side, "8b 256 clients 1024/128", "completed")) == 1
    assert len(figures(result, "ours", "start", "kept_s")) == 1


@pytest.mark.usefixtures("our_stub")
def test_what_was_measured_is_on_disk_before_the_next_measurement(
    shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    measure = compare_sides.RunningServer.measure

    def looking(self: compare_sides.RunningServer, load: compare.Load, seed: int) -> compare_sides.Figures:
        written = json.loads((tmp_path / "out" / "result-online8b.json").read_text())
        seen.append(len(written["measurements"]))
        return measure(self, load, seed)

    monkeypatch.setattr(compare_sides.RunningServer, "measure", looking)
    arguments = ["--group", "online8b", "--model-8b", shape, "--rounds", "2", *SIZES, "--peer", "none"]
    run(tmp_path / "out", *arguments)
    assert seen == [1, 2, 4, 5]  # the starts count


def test_a_comparison_that_is_stopped_leaves_nothing_behind(shape: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmill", "bench", "compare", "--group", "online8b", "--model-8b", shape]
    command += ["--output", str(tmp_path / "out"), "--peer-python", sys.executable, "--peer-command"]
    process = subprocess.Popen(
        [*command, f"{STUB} --start-s 300"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    children: list[psutil.Process] = []

    def has_children() -> bool:
        children[:] = psutil.Process(process.pid).children(recursive=True)
        return bool(children)

    wait_for(has_children, 120, "server of the peer")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)  # as `timeout` does
    assert process.wait(120) == 128 + signal.SIGTERM
    assert all(has_ended(child) for child in children)
    assert (tmp_path / "out" / "result-online8b.json").exists()


def test_offline_sides(tmp_path: Path) -> None:
    model = str(cached_tiny_model("llama"))
    site = write_scripted_peer(tmp_path / "site")
    arguments = ["--group", "offline", "--model-8b", model, "--rounds", "1", "--shrink", "16", "--select", "8b"]
    result = run(tmp_path / "out", *arguments, *TINY, f"--args={ON_CPU}", "--peer-env", f"PYTHONPATH={site}")
    assert [session["version"].split()[0] for session in result["sessions"]] == ["Tokenmill", "vLLM"]
    for side in ("ours", "peer"):
        assert figures(result, side, "8b 512 x 128/128", "output_tok_s")[0] > 0
        assert figures(result, side, "8b decode 256", "input_tok_s")[0] > 0
        assert figures(result, side, "8b decode 256", "num_steps")[0] >= 4
    assert 18.0 <= figures(result, "peer", "8b decode 256", "step_ms")[0] < 1000.0  # 2 ms and 1 ms for each of 16
    assert len(result["table"]) == 2 + 7
    commands = [" ".join(session["command"]) for session in result["sessions"]]
    assert all("--max-model-len 1024" in command for command in commands)  # the positions of the model


def test_ourselves_as_the_peer(tmp_path: Path) -> None:
    model = str(cached_tiny_model("llama"))
    ourselves = "{python} -m tokenmill serve {model} --served-model-name {name} --load-format dummy --dtype {dtype}"
    ourselves += " --max-model-len {max_model_len} --port {port}"
    arguments = ["--group", "online1b", "--model-1b", model, "--rounds", "1", "--shrink", "16", *TINY]
    arguments += [f"--args={ON_CPU}", f"--peer-args={ON_CPU}", "--peer-command", ourselves, "--prompt-format", "text"]
    result = run(tmp_path / "out", *arguments)
    for side in ("ours", "peer"):
        assert figures(result, side, "1b 256 clients 128/256", "completed") == [128, 128]
        assert figures(result, side, "1b 256 clients 128/256", "total_output_tokens") == [2048, 2048]
    assert len(result["table"]) == 2 + 18


def test_every_group_alone_in_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trial that needs neither a GPU nor a peer nor a model: the embedded one, which is GGUF, stands in."""
    trial = [
        "--peer",
        "none",
        "--shrink",
        "64",
        "--rounds",
        "1",
        *TINY,
        "--args=--device cpu --kv-cache-memory-bytes 512m",
    ]
    for group, num_rows in (("offline", 11), ("online8b", 14), ("online1b", 12)):
        result = run(tmp_path / "out", "--group", group, *trial)
        assert result["failures"] == []
        titles = [line.split("|")[1] for line in result["table"][2:]]
        assert len(titles) == len(set(titles)) == num_rows
        assert not any("peer" in title for title in titles)
        assert f"result-{group}.json" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").glob("*.json"))
    assert names == ["result-offline.json", "result-online1b.json", "result-online8b.json"]


PARALLEL_ROWS = {"tp2": 6, "tp4": 6, "tp4-70b": 6, "pp2": 3 * 7 + 2, "dp2": 2 * 6 + 1, "dp4": 2 * 6 + 1}


@pytest.mark.parametrize("group", PARALLEL_ROWS)
def test_every_parallel_group_alone(tmp_path: Path, group: str) -> None:
    model = str(cached_tiny_model("llama"))
    models = ["--model-8b", model, "--model-70b", model]
    trial = ["--peer", "none", *SIZES, "--rounds", "1", "--memory-bandwidth", "10", *TINY]
    result = run(tmp_path / "out", "--group", group, *trial, *models, f"--args={ON_CPU}")
    assert result["failures"] == []
    assert len(result["table"]) - 2 == PARALLEL_ROWS[group]
    shares = {each["variant"]: each["figures"].get("idle_share") for each in result["measurements"]}
    assert sum(share is not None for share in shares.values()) == (3 if group == "pp2" else 0)
    for variant, share in shares.items():
        # On a machine that is busy two stages may be slow at once, each on a step that is then told by its time.
        least = -1.0 if "--pipeline-parallel-size" in variant else 0.0
        assert share is None or least < share < 1.0
    for each in result["measurements"]:
        if "bandwidth_share" in each["figures"]:
            assert 0.0 < each["figures"]["bandwidth_share"] < 1.0


def test_both_sides_are_told_the_size_of_a_group(tmp_path: Path) -> None:
    model = str(cached_tiny_model("llama"))
    site = write_scripted_peer(tmp_path / "site")
    arguments = ["--group", "tp2", "--model-8b", model, "--rounds", "1", "--shrink", "16", "--select", "decode"]
    result = run(tmp_path / "out", *arguments, *TINY, f"--args={ON_CPU}", "--peer-env", f"PYTHONPATH={site}")
    assert result["failures"] == []
    assert len(figures(result, "ours", "8b decode 256", "step_ms")) == 1
    assert len(figures(result, "peer", "8b decode 256", "step_ms")) == 1
    assert "'tensor_parallel_size': 2" in result["sessions"][1]["log_tail"]
