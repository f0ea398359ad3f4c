import json
import sys
from typing import Any

import pytest

from tokenmill_server.cli import collect_env
from tokenmill_server.cli import main as cli
from tokenmill_server.cli.collect_env import masked
from tokenmill_server.version import __version__


@pytest.mark.slow
def test_the_report_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With what torch says, in its own process."""
    monkeypatch.setenv("TOKENMILL_API_KEY", "first-secret")
    monkeypatch.setenv("HF_TOKEN", "second-secret")
    monkeypatch.setenv("TOKENMILL_MAX_NUM_BATCHED_TOKENS", "4k")
    monkeypatch.setenv("TOKENMILL_MODEL", "https://user:third-secret@host/model")
    monkeypatch.setenv("UNRELATED", "private")
    assert cli.main(["collect-env", "--json"]) == 0
    written = capsys.readouterr().out
    assert "secret" not in written
    assert "private" not in written
    report: dict[str, dict[str, Any]] = json.loads(written)
    assert report["Tokenmill"]["version"] == __version__
    assert report["System"]["Python"] == f"{sys.version.split()[0]} ({sys.executable})"
    assert report["Device"]["torch"] == report["Packages"]["torch"]
    assert report["Device"]["CPU kernels"].endswith(".so")
    assert report["Flags from the environment"] == {
        "--model": "https://(not shown)@host/model (TOKENMILL_MODEL)",
        "--api-key": "(not shown)",
        "--max-num-batched-tokens": "4000 (TOKENMILL_MAX_NUM_BATCHED_TOKENS)",
    }
    assert report["Environment"]["HF_TOKEN"] == "(not shown)"
    assert report["Environment"]["TOKENMILL_MAX_NUM_BATCHED_TOKENS"] == "4k"


def test_what_fails_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong flag, whose value is secret, and a torch that cannot be imported."""
    monkeypatch.setenv("TOKENMILL_PORT", "no-port")
    monkeypatch.setenv("DEPLOY_SECRET", "no-port")
    monkeypatch.setattr(collect_env, "_DEVICE_MODULE", "tokenmill_engine.no_such_module")
    assert cli.main(["collect-env"]) == 0
    text = capsys.readouterr().out
    assert f"Tokenmill:\n  version: {__version__}\n" in text
    assert "\n  torch: failed: status 1: " in text
    assert "no_such_module" in text
    assert "\n  error: TOKENMILL_PORT must be" in text
    assert "no-port" not in text


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("HF_TOKEN", "x", "(not shown)"),
        ("hf_token_file", "/x", "(not shown)"),
        ("AWS_SECRET_ACCESS", "x", "(not shown)"),
        ("VLLM_API_KEY", "x", "(not shown)"),
        ("DB_PASSWORD", "x", "(not shown)"),
        ("HF_TOKEN", "", ""),
        ("TOKENIZERS_PARALLELISM", "false", "false"),
        ("TOKENMILL_PORT", "1", "1"),
        ("MAX_TOKENS", "5", "5"),
        ("https_proxy", "http://me:pw@proxy:1/x@y", "http://(not shown)@proxy:1/x@y"),
        ("list", ["a", "b longsecret c"], ["a", "b (not shown) c"]),
        ("error", "got longsecretlonger", "got (not shown)"),
        ("number", 5, 5),
        ("short", "ab", "ab"),
    ],
)
def test_secrets_are_masked(name: str, value: Any, shown: Any) -> None:
    environment = {"A_TOKEN": "longsecret", "B_KEY": "longsecretlonger", "C_KEY": "b", "D_KEY": ""}
    assert masked({name: value}, environment) == {name: shown}
