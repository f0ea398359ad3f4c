"""Runs us and a peer in turn on one machine and prints the figures of both side by side: those of `compare_groups`, in
the order of `compare_plan`."""

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from tokenmill_engine.config.model_files import embedded_model_path, resolve_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench import compare_peer
from tokenmill_server.bench.compare_check import check_variants
from tokenmill_server.bench.compare_groups import plans_of
from tokenmill_server.bench.compare_memory import step_bytes
from tokenmill_server.bench.compare_plan import START, Load, Session, rows_of, seed_offset, sessions_of
from tokenmill_server.bench.compare_process import LoadError, Log, Program, SideError
from tokenmill_server.bench.compare_report import Measurement, card_state, memory_used_mib
from tokenmill_server.bench.compare_result import Result
from tokenmill_server.bench.compare_sides import (
    Deadline,
    Model,
    Running,
    RunningServer,
    free_port,
    started_driver,
    started_server,
)

PEER_SERVER = (
    "{python} -m vllm.entrypoints.cli.main serve {model} --served-model-name {name} --load-format dummy "
    "--dtype {dtype} --max-model-len {max_model_len} --host 127.0.0.1 --port {port} --disable-uvicorn-access-log"
)
PEER_DRIVER = "{python} {driver} --model {model} --dtype {dtype} --max-model-len {max_model_len}"
_OUR_SERVER = (
    "{python} -m tokenmill serve {model} --served-model-name {name} --load-format dummy "
    "--dtype {dtype} --max-model-len {max_model_len} --host 127.0.0.1 --port {port}"
)
_OUR_DRIVER = (
    "{python} -m tokenmill_server.bench.compare_ours --model {model} --load-format dummy "
    "--dtype {dtype} --max-model-len {max_model_len}"
)
_NAME = "m"
"""What both servers call the model."""
_MODEL_KINDS = "a folder with config.json and tokenizer.json (weights are random) or a .gguf file"
_RELEASE_S = 20.0
_RELEASE_POLL_S = 0.2
_RELEASE_SLACK_MIB = 512.0


@dataclass(slots=True, frozen=True)
class Peer:
    """How to run the other side. The templates know {python} {driver} {model} {name} {dtype} {max_model_len} {port}."""

    name: str
    python: str
    environment: dict[str, str]
    server: str = PEER_SERVER
    driver: str = PEER_DRIVER
    flags: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Compare:
    """One comparison."""

    group: str
    """A key of `compare_groups.GROUPS`."""
    models: dict[str, Path]
    """Folders or GGUF files by the names of `ModelPlan`; where sizes are divided, the embedded model stands in for all
    that do not look at images."""
    peer: Peer | None
    output: Path
    rounds: int = 3
    time_limit_s: float = 520.0
    dtype: str = "bfloat16"
    max_model_len: int = 8192
    """For models with fewer positions it is theirs."""
    flags: tuple[str, ...] = ()
    """More flags for our processes, those of `tokenmill serve`."""
    load_options: tuple[str, ...] = ()
    """More options for `bench serve`."""
    bandwidth_gb_s: float | None = None
    """Of one device's memory, in 1e9 bytes per second: with it, decode steps are told as a share of it."""
    prompt_format: str = "ids"
    selected: tuple[str, ...] = ()
    divisor: int = 1
    seed: int = 0


def run(compare: Compare) -> int:
    """Measures and prints the table. Every figure and command goes to `result-GROUP.json` in the output folder, beside
    the logs, after each measurement. Returns the exit code: 1 if anything failed. Main thread only.

    Raises: ConfigError, StartupError.
    """
    plans = plans_of(compare.group, compare.selected, compare.divisor)
    if not plans:
        raise ConfigError(f"no load of the group {compare.group} has {' or '.join(compare.selected)} in its name")
    models = {plan.model: _read_model(compare, plan.model) for plan in plans}
    sessions = sessions_of(plans, compare.rounds, compare.peer is not None)
    check_variants(sessions, {key: model.path for key, model in models.items()}, compare.flags)
    result = Result(
        path=compare.output / f"result-{compare.group}.json",
        group=compare.group,
        rounds=compare.rounds,
        divisor=compare.divisor,
        rows=rows_of(plans, compare.peer is not None),
        peer_name=compare.peer.name if compare.peer is not None else None,
        deadline=Deadline(compare.time_limit_s),
    )
    try:
        compare.output.mkdir(parents=True, exist_ok=True)
        result.save()
    except OSError as error:
        raise ConfigError(f"cannot write to --output {compare.output}: {error.strerror}") from None
    try:
        with (
            _stoppable(),
            tempfile.TemporaryDirectory(prefix="tokenmill-compare-", ignore_cleanup_errors=True) as caches,
        ):
            _Turns(compare, models, result, Path(caches)).run(sessions)
    finally:
        _report(compare, result)
    return 1 if result.failures else 0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the block like an exception, so that no server is left behind. Only the first one counts, to the end
    of the process: `timeout` sends two, and the second must not end what the first has begun."""

    def stop(number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, before)


def _report(compare: Compare, result: Result) -> None:
    """Prints and writes what there is."""
    result.save()
    sizes = f", sizes divided by {compare.divisor}" if compare.divisor > 1 else ""
    sys.stdout.write(f"\n{compare.group} on {result.card}{sizes}\n\n{result.table()}\n")
    for failure in result.failures:
        sys.stdout.write(f"failed: {failure}\n")
    sys.stdout.write(f"Results written to {result.path}\n")


def _read_model(compare: Compare, key: str) -> Model:
    """Raises: ConfigError."""
    path = compare.models.get(key)
    if path is None:
        if key.startswith("vl"):
            raise ConfigError(
                f"--group {compare.group} needs --model-{key}: `python -m benchmarks.media_shapes` makes one"
            )
        if compare.divisor == 1:
            raise ConfigError(f"--group {compare.group} needs --model-{key}: {_MODEL_KINDS}; not with --shrink")
        path = embedded_model_path()
    if not path.exists():
        raise ConfigError(f"--model-{key} {path} does not exist; name {_MODEL_KINDS}")
    files = resolve_model(str(path))
    architecture = files.architecture
    max_model_len = min(compare.max_model_len, architecture.max_position_embeddings)
    if max_model_len < compare.max_model_len:
        _say(f"{files.name} has {max_model_len} positions: --max-model-len {max_model_len} for both sides")
    read = step_bytes(architecture, compare.dtype)
    return Model(Path(files.path).resolve(), architecture.vocab_size, max_model_len, read)


@dataclass(slots=True, frozen=True)
class _Turns:
    """Runs one session after the other."""

    compare: Compare
    models: Mapping[str, Model]
    result: Result
    caches: Path
    """For the sessions that are to start without caches of compiled code."""

    def run(self, sessions: Sequence[Session]) -> None:
        for index, session in enumerate(sessions):
            label = f"{session.side}, {session.model}, {session.variant}"
            try:
                self.result.deadline.check("not started")
                self._run_session(label, session, sessions[index + 1 :])
            except SideError as error:
                self._fail(f"{label}: {error}")
            except Exception:  # whatever a side does, the other's figures are still to come
                self._fail(f"{label}: {traceback.format_exc()}")

    def _run_session(self, label: str, session: Session, following: Sequence[Session]) -> None:
        """Raises: SideError."""
        port = free_port()
        command = _command(self.compare, session, self.models[session.model], port)
        _say(f"{label}: {shlex.join(command)}")
        record: dict[str, Any] = {"side": session.side, "model": session.model, "variant": session.variant}
        record |= {"command": command, "cache": session.cache, "before": card_state()}
        self.result.sessions.append(record)
        memory_mib = memory_used_mib()
        log = Log(self.compare.output / f"{session.side}-{session.model}.log")
        began_s = time.monotonic()
        try:
            deadline = self.result.deadline if following else self.result.deadline.of_last()
            with self._started(session, command, port, log, deadline) as running:
                self.result.start_times_s[session.side, session.model] = time.monotonic() - began_s
                record |= {"version": running.version, "start_s": running.start_s}
                _say(f"{label}: {running.version}, first answer after {running.start_s:.1f} s")
                starts = dict.fromkeys(session.start_metrics, running.start_s)
                self.result.add(Measurement(session.side, session.variant, START, 0, starts))
                self._run_rounds(label, session, running, following)
                record["after"] = card_state()
        finally:
            record["released_s"] = _wait_for_memory(memory_mib)
            record["log_tail"] = log.tail()

    def _run_rounds(self, label: str, session: Session, running: Running, following: Sequence[Session]) -> None:
        """Raises: SideError."""
        for number in session.rounds:
            needed_s = self.result.round_s(session) + self.result.needed_s(following)
            if number > 0 and self.result.deadline.left_s() < needed_s:
                _say(f"{label}: no time for round {number + 1}")
                return
            for load in session.loads:
                try:
                    self._measure(session, running, load, number)
                except LoadError as error:
                    self._fail(f"{label}: {error}")

    def _measure(self, session: Session, running: Running, load: Load, number: int) -> None:
        """Raises: SideError."""
        seed = self.compare.seed + 1000 * (number + 1) + seed_offset(session, load)
        began_s = time.monotonic()
        figures = running.measure(load, seed)
        self.result.load_times_s[session.side, load.name] = time.monotonic() - began_s
        if load.kind == "decode":
            figures |= self._bandwidth_share(session, load, figures["step_ms"] / 1e3)
        done = Measurement(session.side, session.variant, load.name, number, figures, running.describe(load, seed))
        self.result.add(done)
        shown = ("output_throughput", "output_tok_s", "step_ms", "p50_ttft_ms", "p50_itl_ms", "p99_itl_ms")
        told = ", ".join(f"{key} {figures[key]:.5g}" for key in shown if key in figures)
        _say(f"{session.side}, {load.name}, round {number + 1}: {told}")

    def _bandwidth_share(self, session: Session, load: Load, step_s: float) -> dict[str, float]:
        """Of a step in the middle of the output; nothing if the devices' bandwidth is not known."""
        read, bandwidth_gb_s = self.models[session.model].step_bytes, self.compare.bandwidth_gb_s
        if read is None or bandwidth_gb_s is None:
            return {}
        num_tokens = load.num_prompts * (load.input_len + load.output_len / 2)
        return {"bandwidth_share": read.bandwidth_share(num_tokens, step_s, session.num_devices, bandwidth_gb_s)}

    @contextlib.contextmanager
    def _started(
        self, session: Session, command: list[str], port: int, log: Log, deadline: Deadline
    ) -> Iterator[Running]:
        compare, model = self.compare, self.models[session.model]
        death_signal = signal.SIGKILL if session.side == "ours" else signal.SIGINT
        program = Program(command, _environment(compare, session, self.caches), death_signal)
        if not session.is_server:
            with started_driver(program, log, model, deadline) as driver:
                yield driver
            return
        # Chats with images are text.
        as_ids = compare.prompt_format == "ids" and all(load.image_sizes is None for load in session.loads)
        prompts = ["--prompt-format", "ids", "--vocab-size", str(model.vocab_size)] if as_ids else []
        options = [*prompts, "--tokenizer", str(model.path), *compare.load_options]
        with started_server(program, log, RunningServer(port, model, _NAME, deadline, options)) as server:
            yield server

    def _fail(self, what: str) -> None:
        self.result.fail(what)
        _say(f"FAILED: {what}")


def _command(compare: Compare, session: Session, model: Model, port: int) -> list[str]:
    """The command line of a session's process."""
    peer = compare.peer if session.side == "peer" else None
    if peer is not None:
        template = peer.server if session.is_server else peer.driver
        flags = peer.flags
    else:
        template = _OUR_SERVER if session.is_server else _OUR_DRIVER
        flags = compare.flags
    words = {
        "python": peer.python if peer is not None else sys.executable,
        "driver": compare_peer.__file__,
        "model": str(model.path),
        "name": _NAME,
        "dtype": compare.dtype,
        "max_model_len": str(model.max_model_len),
        "port": str(port),
    }
    return [*(word.format_map(words) for word in shlex.split(template)), *flags, *session.flags]


def _environment(compare: Compare, session: Session, caches: Path) -> dict[str, str]:
    environment = dict(os.environ)
    folder = caches / session.side
    if session.cache != "default":
        environment |= {"TRITON_CACHE_DIR": str(folder / "triton"), "TOKENMILL_CACHE_DIR": str(folder / "tokenmill")}
    if session.side == "ours" or compare.peer is None:
        return environment
    if session.cache != "default":
        environment |= {"XDG_CACHE_HOME": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    return environment | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"} | compare.peer.environment


def _wait_for_memory(before_mib: float | None) -> float | None:
    """Seconds until the GPUs have as little memory in use as before the session: its processes are gone, but the driver
    may still be at it, and the next side wants nearly all. None without NVIDIA GPUs or if it took too long."""
    if before_mib is None:
        return None
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < _RELEASE_S:
        used_mib = memory_used_mib()
        if used_mib is None or used_mib <= before_mib + _RELEASE_SLACK_MIB:
            return passed_s
        time.sleep(_RELEASE_POLL_S)
    _say(f"{memory_used_mib()} MiB of the GPUs are still in use, {before_mib} were before")
    return None


def _say(text: str) -> None:
    sys.stderr.write(f"[{datetime.now():%H:%M:%S}] {text}\n")
    sys.stderr.flush()
