"""What an engine core prepares before it knows its configuration, in processes of their own."""

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
from tokenmill_engine.preparation import Preparation
config = dataclasses.replace(tiny_engine_config(), device=DeviceConfig(kind=sys.argv[1]))
preparation = Preparation(may_use_gpu=True)
try:
    executor, capacity = preparation.start_executor(config)
    executor.shutdown()
    print("ready", capacity.num_blocks)
except ImportError as error:
    print("failed:", error)
"""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that finds a driver library without a driver in it, and a Triton that is broken."""
    (tmp_path / "triton.py").write_text(
        "print('Triton is imported', flush=True)\nraise ImportError('no Triton here')\n"
    )
    any_library = str(msgspec._core.__file__)
    (tmp_path / "libcuda.so.1").symlink_to(any_library)
    paths = {
        name: os.pathsep.join(filter(None, (str(tmp_path), os.environ.get(name))))
        for name in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return environment | paths


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


@pytest.mark.parametrize("visible", ["", "-1"])
def test_nothing_is_prepared_for_gpus_that_are_hidden(machine: dict[str, str], visible: str) -> None:
    assert run(machine, "cpu", CUDA_VISIBLE_DEVICES=visible) == ["ready 64"]
