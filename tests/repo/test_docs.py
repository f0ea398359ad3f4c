"""What the pages say exists: files, commands, flags, metrics, dependencies."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tokenmill_server.bench import cli as bench_cli
from tokenmill_server.bench import compare_peer
from tokenmill_server.cli import chat, collect_env, complete, run_batch
from tokenmill_server.cli import main as tokenmill_cli
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED
from tokenmill_server.protocol.chat import ChatRequest
from tokenmill_server.protocol.completions import CompletionRequest
from tokenmill_server.protocol.fields import UNSUPPORTED as UNSUPPORTED_FIELDS
from tokenmill_server.protocol.fields import GenerationFields
from tokenmill_server.version import __version__

REPO = Path(__file__).parents[2]
PAGES = sorted([*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("benchmarks/*.md")])
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
OTHER_PROGRAMS_FLAGS = {"build", "config", "extra-index-url", "help", "no-deps", "strict", "tag", "version"}


def page_ids(page: Path) -> str:
    return str(page.relative_to(REPO))


@pytest.mark.parametrize("page", ["compatibility", "flags", "metrics"])
def test_generated_pages_are_current(page: str) -> None:
    generate = f"import make_pages; print(''.join(make_pages.{page}_page()), end='')"
    made = subprocess.run(
        [sys.executable, "-c", generate], cwd=REPO / "docs", capture_output=True, text=True, check=True
    ).stdout
    assert made == (REPO / "docs" / f"{page}.md").read_text(), "run `make pages`"


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_named_files_exist(page: Path) -> None:
    """`path/with.extension` in backquotes, relative to the repository or to one of the packages."""
    packages = ("server", "server/tokenmill_server", "engine_core", "engine_core/tokenmill_engine")
    roots = [REPO, page.parent, *(REPO / name for name in packages)]
    for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|md|yml|json|toml|sh|txt))`", page.read_text()):
        if name.startswith("."):
            continue
        assert any((root / name).exists() for root in roots), name


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"(?:^ {4}|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert used <= targets


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_flags_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {flag.name for flag in FLAGS.values()} | {f"no-{flag.name}" for flag in FLAGS.values()}
    known |= {row.name for row in UNSUPPORTED.values()} | OTHER_PROGRAMS_FLAGS
    for command in ("serve", "throughput", "latency", "scheduler", "compare"):
        with pytest.raises(SystemExit):
            bench_cli.main([command, "--help"])
    for program in (chat, collect_env, complete, run_batch):
        with pytest.raises(SystemExit):
            program.main(["--help"])
    known |= set(re.findall(r"--([a-z0-9-]+)", capsys.readouterr().out))
    for script in (*REPO.glob("benchmarks/*.py"), Path(compare_peer.__file__)):
        known |= set(re.findall(r'add_argument\("--([a-z0-9-]+)"', script.read_text()))
    used = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", page.read_text()))
    assert used <= known


@pytest.mark.parametrize("page", PAGES, ids=page_ids)
def test_commands_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenmill_cli.main(["--help"]) == 0
    commands = set(re.findall(r"^  ([a-z-]+)  ", capsys.readouterr().out, re.MULTILINE))
    used = set(re.findall(r"(?:^ {4}|/bin/|`)tokenmill ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert used <= commands


def test_api_page_has_every_route_field_and_code() -> None:
    text = (REPO / "docs/api.md").read_text()
    source = (REPO / "server/tokenmill_server/app.py").read_text()
    routes = [path.replace(":path", "") for path in re.findall(r'(?:_post\(app, |add_api_route\()"(/[^"]+)"', source)]
    fields = {*GenerationFields.model_fields, *ChatRequest.model_fields, *CompletionRequest.model_fields}
    codes = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', (REPO / "server/tokenmill_server/errors.py").read_text()))
    assert len(routes) >= 10
    assert [route for route in routes if f"{route}`" not in text] == []
    assert [name for name in (*fields, *UNSUPPORTED_FIELDS, *codes) if f"`{name}`" not in text] == []


def test_every_dependency_is_justified() -> None:
    text = (REPO / "CONTRIBUTING.md").read_text()
    optional = PROJECT["project"]["optional-dependencies"]["dev"]
    for requirement in [*PROJECT["project"]["dependencies"], *optional]:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert f"`{name[0]}`" in text, name[0]


def test_every_dependency_is_pinned() -> None:
    pinned = {line.partition("==")[0] for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line}
    for requirement in [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["dev"]]:
        name = re.match(r"[\w-]+", requirement)
        assert name is not None
        assert name[0] in pinned | {"triton"}, name[0]


def test_clients_are_pinned_and_justified() -> None:
    """The list of Python's begins with those that are wanted for themselves. Locks name no registry."""
    folder, text = REPO / "tests/clients", (REPO / "CONTRIBUTING.md").read_text()
    wanted, *_ = (folder / "requirements.txt").read_text().split("\n\n")
    lines = [line for line in (folder / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if not re.fullmatch(r"[\w-]+==[\w.]+", line)] == []
    names = [line.partition("==")[0] for line in wanted.splitlines() if line[0] != "#"]
    npm = json.loads((folder / "package.json").read_text())["dependencies"]
    assert names
    assert [name for name in (*names, *npm) if f"`{name}`" not in text] == []
    lock = (folder / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    packages = json.loads(lock)["packages"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in npm} == npm


def test_version_is_in_the_changelog() -> None:
    assert f"## {__version__}" in (REPO / "CHANGELOG.md").read_text()


def test_licence_is_whole() -> None:
    text = (REPO / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
