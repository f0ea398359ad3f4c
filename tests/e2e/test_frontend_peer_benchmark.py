"""`benchmarks/frontend_peer.py` with few requests: what it sends and measures, not what comes of it."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.frontend import cpu_s
from benchmarks.frontend_peer import TextMaker, http_processes, summary, table
from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME
from tokenmill_server.bench.compare_process import SideError
from tokenmill_server.bench.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
_LIMIT_S = 300.0


def test_texts_have_the_tokens_that_were_asked_for() -> None:
    tokenizer = load_tokenizer(EMBEDDED_MODEL_NAME)
    maker, again = TextMaker(tokenizer, 7), TextMaker(tokenizer, 7)
    texts = [maker.text(num_tokens) for num_tokens in (1, 17, 400, 400)]
    assert [len(tokenizer.encode(text).ids) for text in texts] == [1, 17, 400, 400]
    assert texts == [again.text(num_tokens) for num_tokens in (1, 17, 400, 400)]
    assert texts[2] != texts[3]


def test_the_cpu_time_of_another_process_is_its_own() -> None:
    command = [sys.executable, "-c", "import sys\nfor _ in range(10**7): pass\nprint(flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        times = psutil.Process(process.pid).cpu_times()
        assert abs(cpu_s([process.pid]) - times.user - times.system) < 0.03  # psutil counts in hundredths
        before_s = cpu_s([process.pid])
        time.sleep(0.05)
        assert cpu_s([process.pid]) - before_s < 0.01
        assert process.stdin is not None
        process.stdin.close()


def test_a_server_without_the_process_that_is_to_be_measured() -> None:
    with pytest.raises(SideError, match="no descendant of the server has a command line with 'no such title'"):
        http_processes(psutil.Process(), "no such title")


def test_the_table_has_medians_extremes_and_the_ratio() -> None:
    rounds = {
        "we": [{"load": {"cpu_us": each, "prompt_tokens": 9}} for each in (10.0, 40.0, 20.0)],
        "they": [{"load": {"cpu_us": each, "prompt_tokens": 9}} for each in (50.0, 100.0, 80.0)],
    }
    (row,) = summary(rounds)
    assert (row["we"]["median"], row["they"]["median"], row["ratio"]) == (20.0, 80.0, 0.25)
    assert table([row]).splitlines()[2] == "| load | 20.0 (10.0 to 40.0) | 80.0 (50.0 to 100.0) | 0.250 |"


@pytest.mark.slow
def test_both_sides_get_the_same_load(tiny_model: Path, tmp_path: Path) -> None:
    flags = "--device cpu --dtype float32 --kv-cache-memory-bytes 64M"
    peer = f"{sys.executable} -m tokenmill serve {{model}} --port {{port}} --served-model-name {{name}} {flags}"
    command = [sys.executable, "-m", "benchmarks.frontend_peer", "--model", str(tiny_model), "--rounds", "1"]
    command += ["--concurrency", "1", "3", "--output-tokens", "4", f"--args={flags}", "--output", str(tmp_path / "out")]
    command += ["--peer", "itself", "--peer-command", peer, "--peer-process", "tokenmill: api server"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out").read_text())["rows"]
    assert [row["load"] for row in rows[:3]] == ["idle second", "stream, 1 at once", "stream, 3 at once"]
    for row in rows:
        ours, theirs = row["Tokenmill"], row["itself"]
        assert min(ours["median"], theirs["median"]) > 0
        assert ours["prompt_tokens"] == theirs["prompt_tokens"]
        assert f"| {row['load']} |" in done.stdout
    short, long = rows[3:]
    assert 32 < short["Tokenmill"]["prompt_tokens"] < 64
    assert 1000 < long["Tokenmill"]["prompt_tokens"] < 1032


def test_a_server_that_does_not_start(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.frontend_peer", "--model", str(tiny_model), "--rounds", "1"]
    command += ["--args=--device nowhere"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
