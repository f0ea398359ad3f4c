"""What holds for every test: a clean environment, no network, no time limit of Hypothesis, nothing left running."""

import glob
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from tokenmill_engine.ipc.logs import PACKAGES

# A developer's own settings must not change a test's outcome; child processes inherit this environment.
for _name in list(os.environ):
    if _name.startswith(("TOKENMILL_", "VLLM_")) and _name not in ("TOKENMILL_CACHE_DIR", "TOKENMILL_TEST_GGUF"):
        del os.environ[_name]
for _name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "PROMETHEUS_MULTIPROC_DIR", "HF_TOKEN"):
    os.environ.pop(_name, None)
os.environ["HF_HUB_OFFLINE"] = "1"
# Child processes that are part of a test are modules of `tests`.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
os.environ["NO_PROXY"] = "127.0.0.1,localhost"
# Triton decides when it is imported whether kernels are compiled or interpreted.
if not glob.glob("/dev/nvidia*"):
    os.environ["TRITON_INTERPRET"] = "1"

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Commands that run inside a test set up logging for a process of their own."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    levels = {name: logging.getLogger(name).level for name in PACKAGES}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends what a failed test left running, so that it cannot disturb the next run."""
    leftover = psutil.Process().children(recursive=True)
    for process in leftover:
        process.kill()
    psutil.wait_procs(leftover, timeout=5)
