"""What holds for every test: a clean environment, no network, the same random numbers, nothing left running."""

import contextlib
import glob
import logging
import operator
import os
import random
import signal
import sys
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
# A shell ignores Ctrl-C for what runs in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Several processes of a test share few cores, where threads of torch that spin while they wait for each other take the
# time of those that they wait for: what takes a small model 6 ms takes it 140 then.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Triton decides when it is imported whether kernels are compiled or interpreted.
if not glob.glob("/dev/nvidia*"):
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples in every run, however slow the machine; `pytest --hypothesis-profile search` looks for others.
_slow_is_fine = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeat", derandomize=True, **_slow_is_fine)
hypothesis.settings.register_profile("search", **_slow_is_fine)
hypothesis.settings.load_profile("repeat")


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """In every run of a test, whichever others came before it."""
    random.seed(0)
    for name, seed in (("numpy", "random.seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            operator.attrgetter(seed)(sys.modules[name])(0)


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


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Ends what a failed test left running, so that it cannot disturb the next run. Processes that run tests for this
    one end in between; what they left running then is no child of theirs any more."""
    leftover = psutil.Process().children(recursive=True)
    yield
    for process in leftover:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(leftover, timeout=5)
