"""The processes of a comparison: a server or an offline driver of one side, started, measured and ended."""

import contextlib
import http.client
import json
import queue
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenmill_server.bench.compare_memory import StepBytes
from tokenmill_server.bench.compare_plan import Load
from tokenmill_server.bench.compare_process import LoadError, Log, Program, SideError, running_process
from tokenmill_server.bench.death_signal import die_with_this_process
from tokenmill_server.bench.image_options import DATASET

Figures = dict[str, float]

_POLL_S = 0.05
_STOP_S = 15.0
_STDERR_CHARS = 2000
_MAX_WARMUPS = 32
_START_PROMPT_TOKENS = 16
_REPLY_CHARS = 300
_SETTLE_S = 2.0
"""After a server's first answer: processes beside the one that gave it may still be starting."""
_ALIVE_S = 0.5
"""How often somebody who waits for a driver looks whether it still runs."""
_STEP_SHARE = 0.4
_STEP_TIMES, _ENCODER_TIMES = (
    re.compile(rf"^tokenmill:{name}_time_seconds_sum\{{.*\}} (\S+)$", re.MULTILINE) for name in ("step", "encoder")
)


class Deadline:
    """How much time is left."""

    def __init__(self, limit_s: float, step_share: float = _STEP_SHARE) -> None:
        self._limit_s = limit_s
        self._step_share = step_share
        self._end_s = time.monotonic() + limit_s

    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    def step(self) -> "Deadline":
        """That of one start or load. A side that hangs must leave time for the other, so it is at most 0.4 of the
        whole."""
        return Deadline(min(self.left_s(), self._step_share * self._limit_s))

    def of_last(self) -> "Deadline":
        """For who comes last: one step may take all that is left."""
        return Deadline(self.left_s(), step_share=1.0)

    def check(self, what: str) -> None:
        """Raises SideError once the time is over."""
        if self.left_s() <= 0:
            raise self.passed(what)

    def passed(self, what: str) -> SideError:
        """What to raise when the time is over."""
        return SideError(f"{what}: the time limit was reached ({max(0.0, self._limit_s):.0f} s)")


@dataclass(slots=True, frozen=True)
class Model:
    """What both sides and the load generator need to know of it."""

    path: Path
    vocab_size: int
    max_model_len: int
    step_bytes: StepBytes | None = None


class Running(Protocol):
    """A started side."""

    version: str
    start_s: float
    """From the command to the first answer."""

    def measure(self, load: Load, seed: int) -> Figures:
        """Runs one load. Raises SideError, or LoadError where the next one may be tried."""

    def describe(self, load: Load, seed: int) -> str:
        """The command or the task that `measure` runs."""


# --- servers ------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A port of this machine on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class RunningServer:
    """A server that has answered."""

    def __init__(self, port: int, model: Model, name: str, deadline: Deadline, load_options: Sequence[str]) -> None:
        self.version = ""
        self.start_s = 0.0
        self._port = port
        self._model = model
        self._name = name
        self._deadline = deadline
        self._load_options = load_options

    def wait_for_answer(self, process: "subprocess.Popen[str]", started_s: float, log: Log) -> None:
        """Asks for one token again and again until it comes. Raises SideError."""
        first = self._model.vocab_size // 2
        prompt = list(range(first, first + _START_PROMPT_TOKENS))
        request = {"model": self._name, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        deadline = self._deadline.step()
        while (reply := self._ask("POST", "/v1/completions", deadline, json.dumps(request))).status != 200:
            if process.poll() is not None:
                raise SideError(f"the server ended with status {process.returncode} while starting:\n{log.tail()}")
            deadline.check(f"waiting for the server's first answer, of which the last try came to {reply}")
            time.sleep(_POLL_S)
        self.start_s = time.monotonic() - started_s
        try:
            self.version = str(json.loads(self._ask("GET", "/version", deadline).body)["version"])
        except (ValueError, TypeError, KeyError):
            self.version = "unknown"

    def measure(self, load: Load, seed: int) -> Figures:
        """Runs `tokenmill bench serve`."""
        deadline = self._deadline.step()
        before = self._spent_s(deadline)
        with tempfile.TemporaryDirectory(prefix="tokenmill-compare-") as folder:
            command = [*self._command(load, seed), "--result-dir", folder, "--result-filename", "result.json"]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=max(1.0, deadline.left_s()),
                    check=False,
                    preexec_fn=die_with_this_process(),
                )
            except subprocess.TimeoutExpired:
                raise deadline.passed(load.name) from None
            if done.returncode:
                raise LoadError(f"{load.name}: the load generator failed: {done.stderr[-_STDERR_CHARS:].strip()}")
            result = json.loads((Path(folder) / "result.json").read_text())
        if result["failed"]:
            raise LoadError(f"{load.name}: {result['failed']} of {load.num_prompts} requests failed: {done.stderr}")
        figures: Figures = {key: value for key, value in result.items() if isinstance(value, int | float)}
        busy_s, encoding_s = (
            after_s - before_s for after_s, before_s in zip(self._spent_s(deadline), before, strict=True)
        )
        if busy_s > 0.0 and not load.warms_up:
            figures["idle_share"] = 1.0 - busy_s / figures["duration"]
        if busy_s > 0.0 and load.image_sizes is not None:
            figures["encoder_share"] = encoding_s / busy_s
        return figures

    def describe(self, load: Load, seed: int) -> str:
        """The command, without where its result goes."""
        return shlex.join(self._command(load, seed))

    def _command(self, load: Load, seed: int) -> list[str]:
        sizes = {
            "--num-prompts": load.num_prompts,
            "--max-concurrency": load.concurrency,
            "--num-warmups": min(load.concurrency, _MAX_WARMUPS) if load.warms_up else 0,
            "--random-input-len": load.input_len,
            "--random-output-len": load.output_len,
            "--seed": seed,
        }
        return [
            *(sys.executable, "-m", "tokenmill", "bench", "serve", "--base-url", f"http://127.0.0.1:{self._port}"),
            *("--model", self._name, "--ignore-eos", "--disable-tqdm", "--metric-percentiles", "50,90,99"),
            *(word for flag, size in sizes.items() for word in (flag, str(size))),
            *(() if load.image_sizes is None else ("--dataset-name", DATASET, "--random-mm-sizes", load.image_sizes)),
            *self._load_options,
        ]

    def _spent_s(self, deadline: Deadline) -> tuple[float, float]:
        """Seconds that steps have taken so far, each as long as its slowest stage was at it, and that they encoded
        media in; on average over engine cores, 0 where the server does not tell."""
        page = self._ask("GET", "/metrics", deadline).body.decode(errors="replace")
        times_s = ([float(each) for each in pattern.findall(page)] for pattern in (_STEP_TIMES, _ENCODER_TIMES))
        busy_s, encoding_s = (statistics.fmean(each) if each else 0.0 for each in times_s)
        return busy_s, encoding_s

    def _ask(self, method: str, path: str, deadline: Deadline, body: str | None = None) -> "_Reply":
        """One exchange on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=max(1.0, deadline.left_s()))
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return _Reply(reply.status, reply.read())
        except (OSError, http.client.HTTPException) as error:
            return _Reply(0, f"{type(error).__name__}: {error}".encode())
        finally:
            connection.close()


@dataclass(slots=True, frozen=True)
class _Reply:
    """What a server answered; status 0 and the reason if it did not."""

    status: int
    body: bytes

    def __str__(self) -> str:
        text = self.body.decode(errors="replace")[:_REPLY_CHARS]
        return f"HTTP {self.status}: {text}" if self.status else text


@contextlib.contextmanager
def started_server(program: Program, log: Log, server: RunningServer) -> Iterator[RunningServer]:
    """`server`, once its process answers; ended with the block. Raises SideError."""
    started_s = time.monotonic()
    with running_process(program, log) as process:
        server.wait_for_answer(process, started_s, log)
        time.sleep(_SETTLE_S)
        yield server


# --- offline drivers ----------------------------------------------------------------------------------------------


class RunningDriver:
    """A process that works on the tasks of `compare_peer.serve_tasks`."""

    def __init__(self, process: "subprocess.Popen[str]", model: Model, deadline: Deadline, log: Log) -> None:
        self._process = process
        self._model = model
        self._deadline = deadline
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, name="driver-output", daemon=True).start()
        started_s = time.monotonic()
        self.version = str(self._answer("starting")["ready"])
        self.measure(Load("warm-up", "throughput", 8, 32, 8), 0)
        self.start_s = time.monotonic() - started_s

    def measure(self, load: Load, seed: int) -> Figures:
        """Hands the driver one task."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(self.describe(load, seed) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._ended(load.name) from None
        answer = self._answer(load.name)
        if "error" in answer:
            raise LoadError(f"{load.name}: {answer['error']}")
        return answer

    def describe(self, load: Load, seed: int) -> str:
        """The task as the driver reads it."""
        return json.dumps(
            {
                "kind": load.kind,
                "num_prompts": load.num_prompts,
                "input_len": load.input_len,
                "output_len": load.output_len,
                "vocab_size": self._model.vocab_size,
                "seed": seed,
            }
        )

    def _answer(self, what: str) -> dict[str, Any]:
        line = self._line(what, self._deadline.step())
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise SideError(f"{what}: the driver wrote {line!r}:\n{self._log.tail()}") from None
        return answer

    def _line(self, what: str, deadline: Deadline) -> str:
        """The next one. A process that the driver left behind may hold the pipe open, so its end is not waited for."""
        while True:
            try:
                line = self._lines.get(timeout=_ALIVE_S)
            except queue.Empty:
                if self._process.poll() is not None and self._lines.empty():
                    raise self._ended(what) from None
                deadline.check(what)
                continue
            if not line:
                raise self._ended(what)
            return line

    def _ended(self, what: str) -> SideError:
        """Its last words come after it has closed its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        return SideError(f"{what}: the driver has ended:\n{self._log.tail()}")

    def _read(self) -> None:
        """Passes on every line, then an empty one for the end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")


@contextlib.contextmanager
def started_driver(program: Program, log: Log, model: Model, deadline: Deadline) -> Iterator[RunningDriver]:
    """A driver that is ready; ended with the block. Raises SideError."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with running_process(program, log, **pipes) as process:
        yield RunningDriver(process, model, deadline, log)
