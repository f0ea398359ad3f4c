"""Compiled modules are kept in the cache directory exactly where they would be compiled at every start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill_engine.config.cache_dir import cache_dir
from tokenmill_kernels.cpu import build

SCRIPT = """
import os, subprocess, sys
from tokenmill_engine.ipc.bytecode import bytecode_environment, keep_bytecode
of_a_child = bytecode_environment(os.environ)
keep_bytecode()
assert bytecode_environment(os.environ) == dict(os.environ) == of_a_child
import torch
print(sys.pycache_prefix, sys.dont_write_bytecode, flush=True)
subprocess.run([sys.executable, "-c", "import sys, torch.nn; print(sys.pycache_prefix)"], check=True)
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a package `torch` that was never imported."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("")
    (site / "torch" / "nn.py").write_text("")
    return site


def run(site: Path, cache: Path, **variables: str) -> list[str]:
    environment = {key: text for key, text in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"PYTHONPATH": str(site), "TOKENMILL_CACHE_DIR": str(cache)} | variables
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.split()


def kept(folder: Path) -> set[str]:
    """Modules of the package that have bytecode below `folder`."""
    return {file.name.partition(".")[0] for file in folder.rglob("torch/**/*.pyc")}


def test_where_python_must_not_write_it_goes_to_the_cache_directory(site: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    place = str(cache / "bytecode")
    for _ in range(2):
        assert run(site, cache, PYTHONDONTWRITEBYTECODE="1") == [place, "False", place]
        assert kept(cache / "bytecode") == {"__init__", "nn"}
        assert not kept(site)


def test_where_python_keeps_it_nothing_changes(site: Path, tmp_path: Path) -> None:
    assert run(site, tmp_path / "cache") == ["None", "False", "None"]
    assert kept(site) == {"__init__", "nn"}
    # It is there now, and good enough for processes that must not write.
    assert run(site, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1") == ["None", "True", "None"]
    assert not (tmp_path / "cache").exists()


def test_a_place_that_was_chosen_stays(site: Path, tmp_path: Path) -> None:
    chosen = str(tmp_path / "chosen")
    assert run(site, tmp_path / "cache", PYTHONPYCACHEPREFIX=chosen) == [chosen, "False", chosen]


def test_an_empty_choice_keeps_nothing(site: Path, tmp_path: Path) -> None:
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": ""}
    assert run(site, tmp_path / "cache", **variables) == ["None", "True", "None"]
    assert not kept(tmp_path)


def test_without_a_usable_cache_directory_nothing_changes(site: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(site, tmp_path / "file", PYTHONDONTWRITEBYTECODE="1") == ["None", "True", "None"]


@pytest.mark.parametrize(
    "variables",
    [{"TOKENMILL_CACHE_DIR": "/a"}, {"XDG_CACHE_HOME": "/b"}, {"HOME": "/c"}],
    ids=lambda value: next(iter(value)),
)
def test_there_is_one_cache_directory(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in ("TOKENMILL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == build.cache_dir()
