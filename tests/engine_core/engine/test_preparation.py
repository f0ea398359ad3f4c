"""What an engine core prepares before it knows its configuration, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import dataclasses, sys, threading
from tests.support.engine_process import tiny_engine_config
from tokenmill_engine.config.engine import DeviceConfig
from tokenmill_engine.ipc.control import EngineStart
from tokenmill_engine.ipc.sockets import local_endpoints
from tokenmill_engine.preparation import Preparation
config = dataclasses.replace(tiny_engine_config(), device=DeviceConfig(kind=sys.argv[1]))
preparation = Preparation(may_use_gpu=True)
try:
    start = EngineStart(0, 0, "/run", local_endpoints("/run", 0), config, 0.0)
    executor, capacity = preparation.start_executor(start, print)
    executor.shutdown()
    print("ready", capacity.num_blocks)
except ImportError as error:
    print("failed:", error)
"""

WORKERS = """
import dataclasses, json, os, sys, tempfile, psutil
from tests.support.engine_process import tiny_engine_config
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.ipc.control import EngineStart
from tokenmill_engine.ipc.sockets import local_endpoints
from tokenmill_engine.preparation import Preparation
executor, prepared, needed, may_use_gpu = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] == ["gpu"]
config = dataclasses.replace(tiny_engine_config(), parallel=ParallelConfig(needed, executor=executor))
preparation = Preparation(may_use_gpu=may_use_gpu, num_workers=prepared)
early = [child.pid for child in psutil.Process().children()]
with tempfile.TemporaryDirectory() as folder:
    start = EngineStart(0, 0, folder, local_endpoints(folder, 0), config, 0.0)
    executor, capacity = preparation.start_executor(start, print)
    serving = [child.pid for child in psutil.Process().children()]
    if may_use_gpu:  # a thread of each is at it, and ends with the worker
        wait_for(lambda: len(os.listdir(os.environ["IMPORTED"])) >= needed, PATIENCE_S, "Triton in each worker")
        assert sorted(map(int, os.listdir(os.environ["IMPORTED"]))) == sorted(serving)
    executor.shutdown()
    left = psutil.Process().children()
print(json.dumps([len(early), len(serving), early == serving, len(left)]))
"""
"""What there is before the configuration is known, and after the start."""

GRAMMARS = """
from tests.support.engine_process import tiny_engine_config
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.ipc.control import EngineStart
from tokenmill_engine.ipc.sockets import local_endpoints
from tokenmill_engine.preparation import Preparation
from tokenmill_engine.structured_output.backends import backends_of
config = tiny_engine_config()
start = EngineStart(0, 0, "/run", local_endpoints("/run", 0), config, 0.0)
Preparation(may_use_gpu=False).start_executor(start, print)[0].shutdown()
wait_for(lambda: "guidance" in backends_of(config.model)._backends, PATIENCE_S, "the library of grammars")
"""

BROKEN_TRITON = """
import os
os.write(1, b"Triton is imported\\n")  # whole, though others write beside
open(os.path.join(os.environ["IMPORTED"], str(os.getpid())), "w").close()
raise ImportError("no Triton here")
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a driver library without a driver in it, and a Triton that is broken.
    Who imports it says so, and leaves a file with its process number in the folder `IMPORTED`."""
    (tmp_path / "triton.py").write_text(BROKEN_TRITON)
    imported = tmp_path / "imported"
    imported.mkdir()
    any_library = str(msgspec._core.__file__)
    (tmp_path / "libcuda.so.1").symlink_to(any_library)
    paths = {
        name: os.pathsep.join(filter(None, (str(tmp_path), os.environ.get(name))))
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return environment | paths | {"IMPORTED": str(imported)}


def run(machine: dict[str, str], device: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, device],
        env=machine | variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_broken_triton_fails_a_start_on_a_gpu_only(machine: dict[str, str]) -> None:
    assert run(machine, "cpu") == ["Triton is imported", "ready 64"]
    assert run(machine, "cuda") == ["Triton is imported", "failed: no Triton here"]


def test_no_request_waits_for_the_library_of_grammars() -> None:
    """A start sets it up."""
    subprocess.run([sys.executable, "-c", GRAMMARS], check=True)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_nothing_is_prepared_for_gpus_that_are_hidden(machine: dict[str, str], visible: str) -> None:
    assert run(machine, "cpu", CUDA_VISIBLE_DEVICES=visible) == ["ready 64"]


@pytest.mark.parametrize(
    ("executor", "prepared", "needed", "expected"),
    [
        ("mp", 2, 2, [2, 2, True, 0]),
        ("mp", 0, 1, [0, 1, False, 0]),
        ("mp", 1, 2, [1, 2, False, 0]),
        ("uni", 1, 1, [1, 0, False, 0]),
    ],
)
def test_workers_are_those_that_were_prepared_if_they_are_what_it_takes(
    executor: str, prepared: int, needed: int, expected: list[object]
) -> None:
    command = [sys.executable, "-c", WORKERS, executor, str(prepared), str(needed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == expected


@pytest.mark.parametrize("size", [1, 2])
def test_workers_that_may_use_gpus_prepare_them_themselves(machine: dict[str, str], size: int) -> None:
    """And not this process. What only GPUs need does not matter where they turn out to be on the CPU."""
    command = [sys.executable, "-c", WORKERS, "mp", str(size), str(size), "gpu"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=machine)
    assert json.loads(done.stdout.splitlines()[-1]) == [size, size, True, 0]
