"""Runs us and a peer in turn on one machine and prints the figures of both side by side. See `compare_plan`."""

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenmill_engine.config.model_files import embedded_model_path, resolve_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench import compare_peer
from tokenmill_server.bench.compare_plan import START, Group, Load, Session, Side, loads_of, rows_of, sessions_of
from tokenmill_server.bench.compare_report import Measurement, card_name, card_state, format_table
from tokenmill_server.bench.compare_sides import (
    Deadline,
    LoadError,
    Log,
    Model,
    Running,
    RunningServer,
    SideError,
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
_GUESSED_START_S: dict[Side, float] = {"ours": 25.0, "peer": 110.0}
_GUESSED_LOAD_S = 8.0
"""For each, until it has been seen."""


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

    group: Group
    models: dict[str, Path]
    """Folders or GGUF files of `8b` and `1b`; where sizes are divided, the embedded model stands in."""
    peer: Peer | None
    output: Path
    rounds: int = 3
    time_limit_s: float = 530.0
    dtype: str = "bfloat16"
    max_model_len: int = 8192
    """For models with fewer positions it is theirs."""
    flags: tuple[str, ...] = ()
    """More flags for our processes, those of `tokenmill serve`."""
    load_options: tuple[str, ...] = ()
    """More options for `bench serve`."""
    prompt_format: str = "ids"
    selected: tuple[str, ...] = ()
    divisor: int = 1
    seed: int = 0


@dataclass(slots=True)
class _Progress:
    """What has been measured, and how long that took."""

    deadline: Deadline
    measurements: list[Measurement] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    start_times_s: dict[Side, float] = field(default_factory=dict)
    load_times_s: dict[tuple[Side, str], float] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        self.failures.append(what)
        _say(f"FAILED: {what}")

    def round_s(self, session: Session) -> float:
        """What a round of `session` takes, as far as is known."""
        return sum(self.load_times_s.get((session.side, load.name), _GUESSED_LOAD_S) for load in session.loads)

    def needed_s(self, sessions: Sequence[Session]) -> float:
        """What these sessions take with one round each."""
        starts_s = [self.start_times_s.get(each.side, _GUESSED_START_S[each.side]) for each in sessions]
        return sum(starts_s) + sum(self.round_s(each) for each in sessions if each.rounds)


def run(compare: Compare) -> int:
    """Measures, prints the table, writes every figure and command to `result-GROUP.json` in the output folder,
    beside the logs, also when it is stopped. Returns the exit code: 1 if anything failed. Main thread only.

    Raises: ConfigError.
    """
    loads = loads_of(compare.group, compare.selected, compare.divisor)
    if not loads:
        raise ConfigError(f"no load of the group {compare.group} has {' or '.join(compare.selected)} in its name")
    models = {key: _read_model(compare, key) for key in loads}
    try:
        compare.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to --output {compare.output}: {error.strerror}") from None
    progress = _Progress(Deadline(compare.time_limit_s))
    sessions = sessions_of(compare.group, loads, compare.rounds, compare.peer is not None)
    shutil.rmtree(_caches(compare), ignore_errors=True)  # what an earlier comparison in this folder left behind
    try:
        with _stoppable():
            _run_sessions(compare, sessions, models, progress)
    finally:
        shutil.rmtree(_caches(compare), ignore_errors=True)
        _report(compare, loads, progress)
    return 1 if progress.failures else 0


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the block like an exception, so that no server is left behind."""
    before = signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_sessions(
    compare: Compare, sessions: Sequence[Session], models: Mapping[str, Model], progress: _Progress
) -> None:
    for index, session in enumerate(sessions):
        label = f"{session.side}, {session.model}, {session.variant}"
        try:
            progress.deadline.check("not started")
            _run_session(compare, session, models[session.model], progress, sessions[index + 1 :])
        except SideError as error:
            progress.fail(f"{label}: {error}")


def _report(compare: Compare, loads: dict[str, tuple[Load, ...]], progress: _Progress) -> None:
    """Prints and writes what there is."""
    peer_name = compare.peer.name if compare.peer is not None else None
    table = format_table(rows_of(compare.group, loads, compare.peer is not None), progress.measurements, peer_name)
    sizes = f", sizes divided by {compare.divisor}" if compare.divisor > 1 else ""
    sys.stdout.write(f"\n{compare.group} on {card_name()}{sizes}\n\n{table}\n")
    for failure in progress.failures:
        sys.stdout.write(f"failed: {failure}\n")
    _write_result(compare, progress, table)


def _read_model(compare: Compare, key: str) -> Model:
    """Raises: ConfigError."""
    path = compare.models.get(key)
    if path is None:
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
    return Model(Path(files.path).resolve(), architecture.vocab_size, max_model_len)


def _run_session(
    compare: Compare, session: Session, model: Model, progress: _Progress, following: Sequence[Session]
) -> None:
    """Raises: SideError."""
    label = f"{session.side}, {session.model}, {session.variant}"
    port = free_port()
    command = _command(compare, session, model, port)
    _say(f"{label}: {shlex.join(command)}")
    before = card_state()
    began_s = time.monotonic()
    record: dict[str, Any] = {"side": session.side, "model": session.model, "variant": session.variant}
    record |= {"command": command, "cache": session.cache, "before": before}
    progress.sessions.append(record)
    with _started(compare, session, model, command, port, progress.deadline) as running:
        progress.start_times_s[session.side] = time.monotonic() - began_s
        record |= {"version": running.version, "start_s": running.start_s}
        _say(f"{label}: {running.version}, first answer after {running.start_s:.1f} s")
        progress.measurements.append(
            Measurement(session.side, session.variant, START, 0, dict.fromkeys(session.start_metrics, running.start_s))
        )
        for number in session.rounds:
            needed_s = progress.round_s(session) + progress.needed_s(following)
            if number != session.rounds.start and progress.deadline.left_s() < needed_s:
                _say(f"{label}: no time for round {number + 1}")
                break
            for load in session.loads:
                try:
                    _measure(compare, session, running, load, number, progress)
                except LoadError as error:
                    progress.fail(f"{label}: {error}")
    record["after"] = card_state()


def _measure(
    compare: Compare, session: Session, running: Running, load: Load, number: int, progress: _Progress
) -> None:
    began_s = time.monotonic()
    seed = compare.seed + 1000 * (number + 1) + session.loads.index(load)
    figures = running.measure(load, seed)
    progress.load_times_s[session.side, load.name] = time.monotonic() - began_s
    progress.measurements.append(
        Measurement(session.side, session.variant, load.name, number, figures, running.describe(load, seed))
    )
    shown = ("output_throughput", "output_tok_s", "step_ms", "p50_ttft_ms", "p50_itl_ms", "p99_itl_ms")
    told = ", ".join(f"{key} {figures[key]:.5g}" for key in shown if key in figures)
    _say(f"{session.side}, {load.name}, round {number + 1}: {told}")


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


def _environment(compare: Compare, session: Session) -> dict[str, str]:
    environment = dict(os.environ)
    if session.side == "peer" and compare.peer is not None:
        return environment | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"} | compare.peer.environment
    if session.cache != "default":
        folder = _caches(compare)
        environment |= {"TRITON_CACHE_DIR": str(folder / "triton"), "TOKENMILL_CACHE_DIR": str(folder / "tokenmill")}
    return environment


def _caches(compare: Compare) -> Path:
    """Kernel caches of the servers that are to start without."""
    return compare.output.resolve() / "caches"


@contextlib.contextmanager
def _started(
    compare: Compare, session: Session, model: Model, command: list[str], port: int, deadline: Deadline
) -> Iterator[Running]:
    environment = _environment(compare, session)
    log = Log(compare.output / f"{session.side}-{session.model}.log")
    if not session.is_server:
        with started_driver(command, environment, log, model, deadline) as driver:
            yield driver
        return
    prompts = ["--prompt-format", compare.prompt_format]
    prompts += ["--vocab-size", str(model.vocab_size)] if compare.prompt_format == "ids" else []
    options = [*prompts, "--tokenizer", str(model.path), *compare.load_options]
    server = RunningServer(port, model, _NAME, deadline, options)
    with started_server(command, environment, log, server):
        yield server


def _write_result(compare: Compare, progress: _Progress, table: str) -> None:
    result = {
        "date": datetime.now().isoformat(timespec="seconds"),
        "group": compare.group,
        "card": card_name(),
        "rounds": compare.rounds,
        "divisor": compare.divisor,
        "sessions": progress.sessions,
        "measurements": [dataclasses.asdict(each) for each in progress.measurements],
        "failures": progress.failures,
        "table": table.splitlines(),
    }
    path = compare.output / f"result-{compare.group}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(f"Results written to {path}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"[{datetime.now():%H:%M:%S}] {text}\n")
    sys.stderr.flush()
