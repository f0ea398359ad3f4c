"""A server of a batch's own: `tokenmill serve` in a child process, on a Unix socket that nobody else knows."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.batch.target import ServerGoneError, Target, is_healthy
from tokenmill_server.bench.death_signal import die_with_this_process
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.table import FLAGS

_NOT_FOR_BATCHES = (
    *("host", "port", "uds", "api_key", "root_path", "headless", "data_parallel_rank"),
    *("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers"),
    *("max_num_queued_reqs", "max_num_queued_tokens", "strict_fields"),
)
"""Flags about strangers who send requests. As variables they are meant for servers, and have no effect here."""
_POLL_S = 0.1
_STOP_S = 15.0


def check_flags(flags: Sequence[str]) -> int:
    """Checks the flags of the server before anything starts; returns how many sequences it runs at once.

    Raises:
        ConfigError: one is wrong, or about serving others.
    """
    values = read_flags(flags, _environment())
    for key in _NOT_FOR_BATCHES:
        if values.is_given(key):
            raise ConfigError(f"{values.written(key)} is about serving others; leave it out")
    return int(values["max_num_seqs"] or 0) * int(values["data_parallel_size"] or 1)


@contextlib.contextmanager
def own_server(flags: Sequence[str], metrics_address: tuple[str, int] | None = None) -> Iterator[Target]:
    """A server that is ready, and gone after the block, also if this process is killed. What it logs goes to standard
    error. With `metrics_address`, a host and a port, it listens there, so that its metrics can be seen. Main thread
    only.

    Raises:
        StartupError: it ended before it was ready; it has said why.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-batch-") as folder:
        socket_path = str(Path(folder) / "socket")
        where = ["--uds", socket_path]
        url = "the batch's server"
        if metrics_address is not None:
            host, port = metrics_address
            where = ["--host", host, "--port", str(port)]
            reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            url = f"http://{f'[{reached}]' if ':' in reached else reached}:{port}"
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", "serve", *flags, *where],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            # Ctrl-C is for this process to act upon; and a signal that ends the launcher at once, whose children see
            # to themselves.
            start_new_session=True,
            preexec_fn=die_with_this_process(signal.SIGKILL),
        )

        def check_alive() -> None:
            if process.poll() is not None:
                raise ServerGoneError(f"the server ended with status {process.returncode}; its log says why")

        target = Target(url, None, None if metrics_address is not None else socket_path, check_alive)
        try:
            _await_ready(process, target)
            yield target
        except BaseException:
            process.kill()  # open requests are sent again by the next run
            raise
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            process.kill()
            process.wait()


def _environment() -> Mapping[str, str]:
    removed = {
        name
        for key in _NOT_FOR_BATCHES
        for name in (FLAGS[key].environment_variable, *(alias.name for alias in FLAGS[key].env))
    }
    return {name: text for name, text in os.environ.items() if name not in removed}


def _await_ready(process: "subprocess.Popen[bytes]", target: Target) -> None:
    """However long it takes: a model may have to be downloaded first."""
    while not is_healthy(target):
        if process.poll() is not None:
            raise StartupError(f"the server ended with status {process.returncode} before it was ready: see above")
        time.sleep(_POLL_S)
