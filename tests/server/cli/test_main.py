import importlib.metadata
import subprocess
import sys

import pytest

from tokenmill_server.cli import main as cli


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmill {importlib.metadata.version('tokenmill')}\n"
    assert cli.main(["--help"]) == 0
    assert "tokenmill COMMAND" in capsys.readouterr().out


def test_without_arguments_the_usage_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenmill"])
    assert cli.main() == 0
    assert "commands:" in capsys.readouterr().out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sevre"]) == 2
    assert "unknown command 'sevre'" in capsys.readouterr().err


def test_serve_help_and_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help=cache"]) == 0
    assert "--block-size" in capsys.readouterr().out
    assert cli.main(["serve", "--help", "tensor"]) == 0
    assert "--tensor-parallel-size" in capsys.readouterr().out
    assert cli.main(["serve", "-h", "--port", "1"]) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert cli.main(["serve", "--blok-size", "3"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tokenmill: error: unknown flag --blok-size; did you mean --block-size?\n"


def test_the_serve_script_is_the_serve_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--help=dp"])
    assert cli.serve() == 0
    assert "--data-parallel-size" in capsys.readouterr().out


def test_python_m_tokenmill() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "serve", "--x"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "tokenmill: error: unknown flag --x\n"


def test_help_and_mistakes_import_nothing_heavy() -> None:
    script = (
        "import sys; from tokenmill_server.cli.main import main; main(['serve', '--help']); main(['serve', '--oops']); "
        "sys.exit(str(sorted({'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy', 'zmq'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "[]"


def test_signals_are_seen_to_before_anything_is_imported() -> None:
    """Until then Ctrl-C shows a traceback."""
    script = (
        "import collections.abc, signal, sys, types; known = {*sys.modules}; import tokenmill_server.cli.main; "
        "print(sorted({*sys.modules} - known))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    imported = {"tokenmill_server", "tokenmill_server.cli", "tokenmill_server.cli.main"}
    assert done.stdout == f"{sorted(imported)}\n"
