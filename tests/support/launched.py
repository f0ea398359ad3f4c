"""`tokenmill serve` in a process of its own, over scripted children: `scripted_engine` and `scripted_api_server`."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.support.server import PATIENCE_S, wait_for

SCRIPT = """
import os
import sys
from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.ipc import stopped
from tokenmill_server import api_servers, launcher, launching, liveness, supervisor
from tokenmill_server.cli import serve
from tokenmill_server.flags import faults
api_servers._MODULE = "tests.support.scripted_api_server"
supervisor._ENGINE_MODULE = "tests.support.scripted_engine"
for module in (launcher, launching, liveness, stopped, faults):
    for name in {*vars(module)} & {*os.environ}:
        setattr(module, name, float(os.environ[name]))
try:
    sys.exit(serve.main(sys.argv[1:]))
except TokenmillError as error:
    sys.exit(f"error: {error}")
"""


class Launched:
    """The launcher's process, what it wrote and what its children wrote."""

    def __init__(
        self, folder: Path, engine: str, api: str, arguments: tuple[str, ...], environment: Mapping[str, str]
    ) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._log, self._children_log = folder / "log", folder / "children"
        self._children_log.touch()
        variables = {
            "CHILD_LOG": str(self._children_log),
            "CHILD_ENGINE": engine,
            "CHILD_API": api,
            "TMPDIR": str(self.temporary),
        }
        with self._log.open("wb") as stream:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    SCRIPT,
                    "--device",
                    "cpu",
                    *(arguments if "--port" in arguments else ("--port", "0", *arguments)),
                ],
                stdout=stream,
                stderr=stream,
                env={**os.environ, **variables, **environment},
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")  # the last character may be half there

    @property
    def children_log(self) -> str:
        return self._children_log.read_text()

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Until `pattern` was written `count` times, by whomever."""
        wait_for(lambda: len(re.findall(pattern, self.log + self.children_log)) >= count, PATIENCE_S, f"{pattern!r}")

    def pid(self, name: str) -> int:
        self.wait_for(f"{name} pid")
        match = re.search(rf"{name} pid (\d+)", self.children_log)
        assert match is not None
        return int(match[1])

    def wait(self, status: int) -> None:
        """Until it ends with `status`; nothing may be left then."""
        assert self.process.wait(PATIENCE_S) == status, self.log
        for pid in re.findall(r"pid (\d+)", self.children_log):
            assert not psutil.pid_exists(int(pid))
        assert list(self.temporary.iterdir()) == []


@contextlib.contextmanager
def launched(
    *arguments: str, engine: str = "ready", api: str = "serve", environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Launched]:
    """What has the name of a constant of `launcher`, `launching`, `liveness`, `stopped` or `faults` in `environment`
    takes its place: seconds."""
    with tempfile.TemporaryDirectory(prefix="l-", ignore_cleanup_errors=True) as folder:
        run = Launched(Path(folder), engine, api, arguments, environment)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
                time.sleep(0.2)
