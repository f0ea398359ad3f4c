"""The command in a process whose surroundings are broken."""

import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.support.server import PATIENCE_S, wait_for
from tests.support.tiny_models import cached_tiny_model

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "tokenmill", "serve"]
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "64M", "--port", "0")


def run(*arguments: "str | bytes", **options: object) -> "subprocess.CompletedProcess[str]":
    """`tokenmill serve` that is expected to end by itself."""
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False, **options
    )


def test_arguments_that_are_not_text() -> None:
    result = run("--served-model-name", b"\xff")
    assert result.returncode == 1
    assert result.stderr == "tokenmill: error: the argument b'\\xff' is not valid UTF-8\n"


@pytest.mark.parametrize("limit", [8, 20])
def test_too_few_open_files(limit: int) -> None:
    result = run(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("tokenmill: error: too many open files")
    assert "raise `ulimit -n`" in result.stderr
    assert "Traceback" not in result.stderr


def hang_up_again() -> None:
    """Whoever runs the tests under `nohup` has SIGHUP ignored, by children as well."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_before_there_is_a_server(number: signal.Signals, tmp_path: Path) -> None:
    """It ends with the status of a process that has done nothing; the first moments are the interpreter's own."""
    log = tmp_path / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen([*COMMAND, *FLAGS], stdout=stream, stderr=stream, preexec_fn=hang_up_again)
    handler = 1 << (number - 1)

    def is_caught() -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught & 1 << (signal.SIGTERM - 1)) and bool(caught & handler)

    wait_for(is_caught, PATIENCE_S, "a handler", poll_s=0.002)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        assert time.monotonic() < deadline
        process.send_signal(number)
        time.sleep(0.001)
    assert process.returncode == 128 + number
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("surroundings", ["2>/dev/full", "2>&-", "2>&- 1>&- 0<&-", "deleted"])
def test_a_server_serves_without_standard_error_and_without_a_folder(surroundings: str, tmp_path: Path) -> None:
    socket = tmp_path / "socket"
    folder = tmp_path / "folder"
    folder.mkdir()
    words = " ".join([*COMMAND, str(cached_tiny_model("llama")), *FLAGS[:-2], "--uds", str(socket)])
    line = f"rmdir ../folder; exec {words}" if surroundings == "deleted" else f"exec {words} {surroundings}"
    process = subprocess.Popen(["sh", "-c", line], cwd=folder)
    try:
        wait_for(socket.exists, PATIENCE_S, "a socket")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=PATIENCE_S) as client:
            wait_for(lambda: client.get("http://server/health").status_code == 200, PATIENCE_S, "a healthy server")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
