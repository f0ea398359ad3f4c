"""The script for GPU machines, where programs in the place of Python and the card's tool tell what they were asked."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PYTHON = """#!/bin/bash
echo "$*" >> "$ASKED"
case "$*" in
  "-m pytest "*) exit 1 ;;
  *"bench compare"*)
    folder=$(sed 's/.*--output \\([^ ]*\\).*/\\1/' <<< "$*")
    mkdir -p "$folder"
    echo {} > "$folder/result-$(basename "$folder").json"
    echo started > "$folder/ours-8b.log" ;;
esac
"""
CARD = """#!/bin/bash
echo "NVIDIA H200"
"""
XZ = f"""#!{sys.executable}
import lzma, shutil, sys
shutil.copyfileobj(lzma.open(sys.stdin.buffer), sys.stdout.buffer)
"""
"""For tar: not every machine that runs tests has the program."""


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of the script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("python3", PYTHON), ("nvidia-smi", CARD), ("xz", XZ)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "scratch").mkdir()
    peer = tmp_path / "peer"
    peer.mkdir()
    for archive in ("payload", "models"):
        with tarfile.open(peer / f"{archive}.tar.xz", "w:xz"):
            pass
    variables = {"SCRATCH": str(tmp_path / "scratch"), "ASKED": str(tmp_path / "asked"), "WHEELS": str(tmp_path)}
    return os.environ | variables | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


def run(machine: dict[str, str], tmp_path: Path, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and what Python was asked for after installing."""
    command = [str(REPO / "benchmarks" / "gpu_host.sh"), *arguments]
    status = subprocess.run(command, env=machine, capture_output=True, check=False).returncode
    return status, (tmp_path / "asked").read_text().splitlines()[1:]


def test_all_parts_for_four_gpus_run_though_the_first_one_fails(machine: dict[str, str], tmp_path: Path) -> None:
    status, asked = run(machine, tmp_path, "parallel", "4", str(tmp_path / "peer"), str(tmp_path / "out"))
    assert status == 1
    tests, sums, shape, *groups = asked
    assert "pytest" in tests
    assert "tests/gpu/test_parallel.py" in tests
    assert sums == "-m benchmarks.all_reduce --size 4"
    assert shape.startswith("-m benchmarks.shapes 70b")
    assert [words.split("--group ")[1].split()[0] for words in groups] == ["tp4", "tp4-70b", "dp4"]
    assert all("--memory-bandwidth 4800" in words for words in groups)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    results = {f"{kind}.json" for kind in ("result-tp4", "result-tp4-70b", "result-dp4")}
    parts = {f"{part}.txt" for part in ("tests", "all_reduce", "tp4", "tp4-70b", "dp4")}
    assert names == results | parts | {"logs.tar.gz"}
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as logs:
        assert "./dp4/ours-8b.log" in logs.getnames()


def test_named_parts_alone(machine: dict[str, str], tmp_path: Path) -> None:
    peer, output = str(tmp_path / "peer"), str(tmp_path / "out")
    status, asked = run(machine, tmp_path, "parallel", "2", peer, output, "all_reduce", "preemption")
    assert status == 0
    assert [words.split()[1] for words in asked] == [
        "benchmarks.all_reduce",
        "benchmarks.shapes",
        "benchmarks.preemption",
    ]


def test_a_number_of_gpus_without_parts_is_refused(machine: dict[str, str], tmp_path: Path) -> None:
    status, asked = run(machine, tmp_path, "parallel", "3", str(tmp_path / "peer"), str(tmp_path / "out"))
    assert (status, asked) == (2, [])
