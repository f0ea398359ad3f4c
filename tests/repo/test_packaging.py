"""The wheel and the editable install, each in an environment of its own."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tokenmill_server.version import __version__

REPO = Path(__file__).parents[2]
PACKAGES = ("tokenmill", "tokenmill_server", "tokenmill_engine", "tokenmill_kernels")
SOURCES = {
    "tokenmill": REPO / "server",
    "tokenmill_server": REPO / "server",
    "tokenmill_engine": REPO / "engine_core",
    "tokenmill_kernels": REPO / "kernels",
}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What it prints. It must not find the sources by PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def pip_install(python: Path, *arguments: str | Path) -> None:
    """Install without an index and without dependencies, which come from this environment."""
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps", *arguments)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Python of a new environment that sees this one's packages, but not its editable install of this project."""
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / "bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    assert run(python, "-c", "import importlib.util as u; print(u.find_spec('tokenmill'))").strip() == "None"
    return python


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build needs, as git would hand it out."""
    copy = tmp_path_factory.mktemp("source")
    listed = run("git", "ls-files", "-co", "--exclude-standard", "server", "engine_core", "kernels", cwd=REPO).split(
        "\n"
    )
    for name in [*filter(None, listed), "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"]:
        if (REPO / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((REPO / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
    )
    (path,) = folder.glob("tokenmill-*-py3-none-any.whl")
    return path


def test_wheel_holds_every_source_file_and_nothing_else(wheel: Path, source: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for package, folder in SOURCES.items():
        root = source / folder.name
        expected |= {str(path.relative_to(root)) for path in (root / package).rglob("*") if path.is_file()}
    assert packed == expected
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed
    assert any(name.startswith("tokenmill_kernels/cpu/csrc/") and name.endswith(".cpp") for name in packed)


def test_wheel_is_small_and_asks_for_little(wheel: Path) -> None:
    assert wheel.stat().st_size < 2_000_000
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = HeaderParser().parsestr(archive.read(name).decode())
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert len(required) < 28
    assert metadata["License-Expression"] == "Apache-2.0"


def test_wheel_runs_when_installed(wheel: Path, environment: Path, tmp_path: Path) -> None:
    pip_install(environment, wheel)
    where = run(environment, "-c", "import tokenmill_server, tokenmill_kernels as k; print(k.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment.parents[1])
    version = __version__
    for command in (["tokenmill"], ["python", "-m", "tokenmill"]):
        program = environment.parent / command[0]
        assert version in run(program, *command[1:], "--version", cwd=tmp_path)
    assert "--api-server-count" in run(environment.parent / "serve", "--help", cwd=tmp_path)
    assert run(environment, "-c", "from tokenmill import LLM, SamplingParams; print(LLM)", cwd=tmp_path)


def test_editable_install_follows_the_sources(source: Path, environment: Path, tmp_path: Path) -> None:
    pip_install(environment, "--no-build-isolation", "-e", source)
    program = (
        "import tokenmill_server, tokenmill_engine, tokenmill_kernels, tokenmill; print(tokenmill_engine.__file__)"
    )
    assert run(environment, "-c", program, cwd=tmp_path).strip() == str(
        source / "engine_core/tokenmill_engine/__init__.py"
    )
    (source / "kernels/tokenmill_kernels/new_module.py").write_text("VALUE = 7\n")
    assert run(environment, "-c", "from tokenmill_kernels.new_module import VALUE; print(VALUE)").strip() == "7"
