"""What every launcher does at its start: the signals that end it, also early, and the environment of its children."""

import logging
import os
import signal
import time
from typing import NoReturn

from tokenmill_server.flags.values import FlagValues
from tokenmill_server.run_dir import RunDir
from tokenmill_server.supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

_REPEAT_S = 0.3
"""Signals this soon after the first are the same wish: `timeout` and others signal a process and its group. Nobody who
has read that another one ends the server at once is as quick."""


def end_at_once(number: signal.Signals, engines: EngineSupervisor, run_dir: RunDir) -> NoReturn:
    """Ends this process, with the status of one that has not served, whatever it is doing: a download may go on for
    minutes, and an exception would wait for its threads."""
    try:
        engines.stop()
        run_dir.close()
        log_early_stop(number)
    finally:
        os._exit(stopped_early(number))


def log_early_stop(number: signal.Signals) -> None:
    """Says why a launcher ends that has not served yet."""
    logger.info("%s: stopped before the model was loaded", number.name)


def stopped_early(number: signal.Signals) -> int:
    """The exit status of a launcher that a signal ends before it serves: as shells tell of a process that the signal
    itself has ended, so that nobody takes it for one that has done its work."""
    return 128 + number


def is_same_wish(number: signal.Signals, drain_began: float) -> bool:
    """Whether a signal that comes during a drain is the one that began it, on the monotonic clock, once more; if so the
    log tells."""
    if time.monotonic() - drain_began >= _REPEAT_S:
        return False
    logger.info("%s: so soon after the first it counts as the same; again to stop at once", number.name)
    return True


def child_environment(run_dir: RunDir) -> dict[str, str]:
    """Of the processes that a launcher starts: ours, and where their metrics go."""
    return {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(run_dir.metrics)}


def workers_asked_for(values: FlagValues) -> int:
    """Worker processes that each engine core is going to have, as far as flags alone tell; 0: it computes itself."""
    size: int = values["tensor_parallel_size"] * values["pipeline_parallel_size"]
    return size if size > 1 or values["distributed_executor_backend"] == "mp" else 0


def may_spawn_early(num_engines: int, num_workers: int) -> bool:
    """Whether processes may begin to import before the configuration is checked. Not if there are more of them than
    cores, which one mistyped digit is enough for."""
    return num_engines * max(1, num_workers) <= len(os.sched_getaffinity(0))


def stop_signals() -> list[signal.Signals]:
    """Those that mean: finish and end. Under `nohup` the end of the terminal does not."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    return numbers if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*numbers, signal.SIGHUP]
