"""The processes of a comparison, where they misbehave."""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from tokenmill_server.bench import compare, compare_report
from tokenmill_server.bench.compare_plan import Load
from tokenmill_server.bench.compare_process import Log, Program, SideError, running_process
from tokenmill_server.bench.compare_sides import (
    Deadline,
    Model,
    RunningDriver,
    RunningServer,
    free_port,
    started_driver,
    started_server,
)

MODEL = Model(Path("/m"), 1000, 512)
READY = """
import json, os, subprocess, sys
print(json.dumps({"ready": "scripted"}), flush=True)
sys.stdin.readline()
print(json.dumps({}), flush=True)
"""
"""Starts, and answers the task that warms it up."""
LEAVES_A_CHILD = 'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])\n'


def start(tmp_path: Path, program: str, limit_s: float = 60.0) -> RunningDriver:
    """The error that `started_driver` raises leaves this function."""
    log = Log(tmp_path / "side.log")
    with started_driver(Program([sys.executable, "-c", program], os.environ), log, MODEL, Deadline(limit_s)) as driver:
        return driver


def test_a_deadline_and_its_steps() -> None:
    whole = Deadline(100.0)
    assert 1.0 < whole.step().left_s() <= 40.0
    began = Deadline(0.2)
    time.sleep(0.15)
    assert began.step().left_s() <= 0.05
    assert 50.0 < whole.of_last().step().left_s() <= 100.0
    whole.check("nothing")
    with pytest.raises(SideError, match=r"it: the time limit was reached \(0 s\)"):
        Deadline(0.0).check("it")


def test_a_driver_whose_child_holds_its_output_open_is_seen_to_end(tmp_path: Path) -> None:
    program = f"{READY}{LEAVES_A_CHILD}sys.stdin.readline(); sys.exit('out of memory')"
    log = Log(tmp_path / "side.log")
    command = [sys.executable, "-c", program]
    with started_driver(Program(command, os.environ), log, MODEL, Deadline(600.0)) as driver:
        began_s = time.monotonic()
        with pytest.raises(SideError, match="out of memory"):
            driver.measure(Load("a load", "decode", 1, 1, 1), 0)
        assert time.monotonic() - began_s < 120.0


def test_what_a_driver_left_behind_ends_with_it(tmp_path: Path) -> None:
    log = Log(tmp_path / "side.log")
    program = f"import subprocess, sys\n{LEAVES_A_CHILD}"
    with running_process(Program([sys.executable, "-c", program], os.environ), log) as process:
        process.wait(60)
        group = process.pid
        assert _living(group)
    assert _living(group) == []


def _living(group: int) -> list[int]:
    """Processes of a process group that run."""
    members: list[int] = []
    for each in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(each.pid) == group and each.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(each.pid)
    return members


def test_a_driver_that_writes_something_else(tmp_path: Path) -> None:
    with pytest.raises(SideError, match="starting: the driver wrote 'Hello"):
        start(tmp_path, "print('Hello', flush=True); input()")


def test_a_driver_that_never_starts(tmp_path: Path) -> None:
    with pytest.raises(SideError, match=r"starting: the time limit was reached \(\d s\)"):
        start(tmp_path, "import time; time.sleep(300)", limit_s=2.0)


def test_a_server_that_never_starts_costs_its_share_of_the_time(tmp_path: Path) -> None:
    server = RunningServer(free_port(), MODEL, "m", Deadline(2.5), [])
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    with (
        pytest.raises(SideError, match=r"Connection refused: the time limit was reached \(\d s\)"),
        started_server(Program(command, os.environ), Log(tmp_path / "side.log"), server),
    ):
        pytest.fail("it never answers")


def test_a_server_that_ends_while_starting_has_its_last_words_told(tmp_path: Path) -> None:
    server = RunningServer(free_port(), MODEL, "m", Deadline(600.0), [])
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(SideError, match=r"ended with status 1 while starting:\n.*\nno such model"),
        started_server(Program(command, os.environ), Log(tmp_path / "side.log"), server),
    ):
        pytest.fail("it never answers")


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `nvidia-smi` that says what is in the file."""
    said = tmp_path / "said"
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nfor each; do case $each in --id=*) exec grep "^${{each#--id=}} " {said};; esac; done\ncat {said}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return said


def test_memory_of_all_cards(card: Path) -> None:
    card.write_text("1000 MiB\n24 MiB\n")
    assert compare_report.memory_used_mib() == 1024.0
    card.write_text("[N/A]\n")
    assert compare_report.memory_used_mib() is None


def test_memory_of_the_cards_that_the_sides_see(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card.write_text("7 MiB\n1000 MiB\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert compare_report.memory_used_mib() == 7.0


def test_the_next_side_starts_when_the_memory_is_free(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card.write_text("900 MiB\n")
    assert compare._wait_for_memory(None) is None
    waited_s = compare._wait_for_memory(600.0)
    assert waited_s is not None
    monkeypatch.setattr(compare, "_RELEASE_S", 0.5)
    assert compare._wait_for_memory(100.0) is None
