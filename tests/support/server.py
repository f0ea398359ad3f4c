"""A real `tokenmill serve` for end-to-end tests, and the checks that every attack on one must end with."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

CONTROL_PROMPT = "The capital of France is"
PATIENCE_S = 60.0
"""How long a test waits for what takes a moment, or seconds if processes start: the machine may be busy, or slow. What
the product itself bounds by less is told apart by what it says, not by the clock."""
_READY = re.compile(r"is ready at (\S+) after")
_START_TIMEOUT_S = 180.0


class Server:
    """One running server. `log` is everything its processes wrote."""

    def __init__(self, process: "subprocess.Popen[bytes]", log_file: Path) -> None:
        self.process = process
        self._log_file = log_file
        self.url = ""
        self.http = _new_client()
        self._control_text: str | None = None
        self._engine_pids: list[int] = []

    # --- life -----------------------------------------------------------------------------------------------------

    @property
    def log(self) -> str:
        return self._log_file.read_text(encoding="utf-8", errors="replace")

    def wait_until_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        wait_for(lambda: _READY.search(self.log) or self.process.poll() is not None, timeout_s, "a started server")
        match = _READY.search(self.log)
        assert match is not None, f"the server ended with status {self.process.returncode}:\n{self.log}"
        self.url = match[1]
        self.http.base_url = httpx.URL(self.url)

    def remember_control(self) -> None:
        """Takes the answer and the processes that `check_alive` compares with."""
        self._control_text = self._control()
        self._engine_pids = self.engine_pids()

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = PATIENCE_S) -> int:
        """Signals the launcher and waits for its end; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(timeout_s)

    def drop_connections(self) -> None:
        """Closes those that `http` keeps alive."""
        self.http.close()
        self.http = _new_client()
        self.http.base_url = httpx.URL(self.url)

    @staticmethod
    def kill(pid: int) -> None:
        """SIGKILL to one process."""
        os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends whatever still runs."""
        self.http.close()
        descendants = self.descendants()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(AssertionError):
            wait_for(lambda: all(map(has_ended, descendants)), 5, "end of what was killed")

    # --- processes ------------------------------------------------------------------------------------------------

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def engine_pids(self) -> list[int]:
        return self._pids("engine core ")

    def api_server_pids(self) -> list[int]:
        return self._pids("api server ")

    def worker_pids(self, engine: int = 0) -> list[int]:
        """Those of one engine core, in the order of their ranks; none where it computes itself."""
        return self._pids(rf"worker {engine}\.")

    def _pids(self, role: str) -> list[int]:
        """Process ids in the order of the processes' numbers, which their titles carry."""
        found: dict[int, int] = {}
        for process in self.descendants():
            with contextlib.suppress(psutil.Error):
                match = re.match(rf"tokenmill: {role}(\d+)", " ".join(process.cmdline()))
                if match is not None:
                    found[int(match[1])] = process.pid
        return [found[number] for number in sorted(found)]

    # --- requests -------------------------------------------------------------------------------------------------

    def complete(self, prompt: Any = CONTROL_PROMPT, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed; greedy and of 8 tokens unless told otherwise."""
        response = self.post("/v1/completions", prompt=prompt, **{"max_tokens": 8, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return dict(response.json())

    def text(self, prompt: Any = CONTROL_PROMPT, **fields: Any) -> str:
        return str(self.complete(prompt, **fields)["choices"][0]["text"])

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics as `name{label=value,...}` without the namespace, labels sorted."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                samples[f"{sample.name.partition(':')[2] or sample.name}{{{labels}}}"] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of one series over all engines and other labels that are not given."""
        wanted = [f"{key}={value}" for key, value in labels.items()]
        found = [
            value
            for key, value in self.metrics().items()
            if key.partition("{")[0] == name and all(label in key for label in wanted)
        ]
        assert found, f"/metrics has no {name} {wanted}"
        return sum(found)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Soon: healthy, the control request answers as it did at the start, same engine processes."""
        assert self._control_text is not None, "remember_control() was not called"
        wait_for(lambda: self.http.get("/health").status_code == 200, PATIENCE_S, "a healthy server")
        assert self._control() == self._control_text
        assert self.engine_pids() == self._engine_pids

    def check_idle(self) -> None:
        """Soon, by scraping alone: nothing runs, nothing waits, no KV block is in use."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            load = {key: value for key, value in self.metrics().items() if key.partition("{")[0] in names}
            assert {key.partition("{")[0] for key in load} == set(names)
            busy = {key: value for key, value in load.items() if value != 0}
            if not busy:
                return
            assert time.monotonic() < deadline, f"still busy after {PATIENCE_S} s: {busy}"
            time.sleep(0.05)

    def _control(self) -> str:
        return self.text(CONTROL_PROMPT, max_tokens=8, temperature=0)


def _new_client() -> httpx.Client:
    return httpx.Client(timeout=60, trust_env=False)


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """An error in OpenAI's shape that gives nothing of the inside away; returns the error object."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    assert "Traceback" not in error["message"]
    assert not re.search(r"/\w+/\w+\.py\b", error["message"])
    return dict(error)


@contextlib.contextmanager
def start_server(
    *arguments: str, env: Mapping[str, str] | None = None, wait: bool = True, port: int = 0
) -> Iterator[Server]:
    """`tokenmill serve` with `arguments`, on a free port unless one is named; ended afterwards, by force if need be.

    With `wait` it has answered the control request before the block is entered. Arguments that name `--uds` go
    without a port.
    """
    listen = [] if "--uds" in arguments else ["--port", str(port)]
    command = [sys.executable, "-m", "tokenmill", "serve", *arguments, *listen]
    with tempfile.TemporaryDirectory(prefix="tm-e2e-") as folder:
        log_file = Path(folder) / "log"
        with log_file.open("wb") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, env=os.environ | (env or {})
            )
        server = Server(process, log_file)
        try:
            if wait:
                server.wait_until_ready()
            yield server
        except BaseException:
            sys.stderr.write(f"--- log of `tokenmill serve {' '.join(arguments)}` ---\n{server.log}\n---\n")
            raise
        finally:
            server.close()


def run_serve(
    *arguments: str, timeout_s: float = 2 * PATIENCE_S, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """`tokenmill serve` that is expected to end by itself, with `env` added to the environment."""
    return subprocess.run(
        [sys.executable, "-m", "tokenmill", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )


def has_ended(process: psutil.Process) -> bool:
    """Whether it runs no more; one that is not our child may stay a zombie until its new parent reaps it. So does one
    whose main thread alone has ended: as long as there are others, nothing is closed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str, poll_s: float = 0.02) -> None:
    """Returns once `condition()` is true; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(poll_s)
