"""The command line of `benchmarks/preemption.py`, and what it leaves behind however it ends."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, wait_for
from tests.support.tiny_models import tiny_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARK = ["benchmarks.preemption", "--only", "data parallel"]
COMPARISON = [
    "tokenmill",
    "bench",
    "compare",
    "--group",
    "dp2",
    "--peer",
    "none",
    "--shrink",
    "64",
    "--dtype",
    "float32",
]
COMPARISON += ["--args=--device cpu --kv-cache-memory-bytes 64m"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For temporary files: sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        yield Path(folder)


def start(module: Sequence[str], scratch: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "TMPDIR": str(scratch)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-m", *module], env=environment, cwd=ROOT, text=True, **pipes)


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes of its server, once an engine core and an API server are among them."""
    found: list[psutil.Process] = []

    def all_are_there() -> bool:
        found[:] = psutil.Process(process.pid).children(recursive=True)
        commands: list[str] = []
        for each in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.append(" ".join(each.cmdline()))
        return all(any(name in command for command in commands) for name in ("engine core", "api server"))

    wait_for(all_are_there, PATIENCE_S, "processes of a server")
    return found


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nothing"], "--only nothing: no server is called so; there are: as it is; more cache; fewer"),
        (["--only", "as it is", "--only", "mroe"], "--only mroe: no server is called so"),
        (["--model", "/nonexist"], "/nonexist"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments: Sequence[str], words: str, scratch: Path) -> None:
    process = start(["benchmarks.preemption", *arguments], scratch)
    out, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert out == ""
    assert error.startswith("python -m benchmarks.preemption: error: ")
    assert words in error
    assert error.count("\n") == 1


def test_a_server_that_cannot_start_is_told_without_a_traceback(scratch: Path) -> None:
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config("llama")))
    process = start(["benchmarks.preemption", "--only", "as it is", "--model", str(model)], scratch)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert error.startswith("python -m benchmarks.preemption: error: the server ended with status 1 while starting:")
    assert "Traceback" not in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly(number: signal.Signals, scratch: Path) -> None:
    process = start(BENCHMARK, scratch)
    started = descendants(process)
    process.send_signal(number)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (128 + number, "")
    wait_for_ends(started)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("module", [BENCHMARK, COMPARISON], ids=["preemption", "compare"])
def test_killed_it_leaves_no_process_behind(module: Sequence[str], scratch: Path) -> None:
    if module is COMPARISON:
        module = [*module, "--output", str(scratch / "out")]
    process = start(module, scratch)
    started = descendants(process)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_for_ends(started)
    left = {f"tokenmill-{each.pid}-" for each in started}
    wait_for(
        lambda: not [each for each in scratch.iterdir() if any(map(each.name.startswith, left))], PATIENCE_S, "end"
    )
