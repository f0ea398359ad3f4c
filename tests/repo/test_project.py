"""Conventions that no linter checks."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
LONG_FILES: dict[str, str] = {}
"""Path in the repository -> why it may be longer, up to MAX_LONG_FILE_LINES."""
MAX_LONG_FILE_LINES = 600
LONG_FUNCTIONS = {"prefill_kernel": "one kernel: its state is in registers and its three loops share it"}
NOT_COLLECTED = {"clients", "gpu", "support", "data"}


def sources() -> Iterator[Path]:
    for folder in ("server", "engine_core", "kernels"):
        yield from (REPO / folder).rglob("*.py")


def test_every_folder_of_tests_is_collected() -> None:
    folders = {path.name for path in (REPO / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    collected = {Path(path).name for path in PROJECT["tool"]["pytest"]["ini_options"]["testpaths"]}
    assert folders - NOT_COLLECTED == collected


def test_package_files_are_empty_but_for_the_public_face() -> None:
    full = [path.parent.name for path in sources() if path.name == "__init__.py" and path.read_text().strip()]
    assert full == ["tokenmill"]


def test_every_package_says_that_it_is_typed() -> None:
    assert {
        path.parent.name
        for folder in ("server", "engine_core", "kernels")
        for path in (REPO / folder).glob("*/py.typed")
    } == {"tokenmill", "tokenmill_server", "tokenmill_engine", "tokenmill_kernels"}


def test_files_and_functions_stay_readable() -> None:
    for path in sources():
        text = path.read_text()
        is_long = str(path.relative_to(REPO)) in LONG_FILES
        assert text.count("\n") <= (MAX_LONG_FILE_LINES if is_long else MAX_FILE_LINES), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in LONG_FUNCTIONS:
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                assert num_lines <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {num_lines} lines"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        path for path in sources() if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []
