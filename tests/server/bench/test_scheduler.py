"""`tokenmill bench scheduler`: runs the engine's benchmark in a process of its own and reports what it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.bench import cli, scheduler

TIMES = {"step_us_median", "step_us_mean", "step_us_p99", "prepare_us_mean", "encode_us_mean"}


def measure(folder: Path, preparation: str) -> dict[str, Any]:
    path = folder / "out.json"
    arguments = ["--num-seqs", "300", "--num-steps", "40", "--num-clients", "3", "--preparation", preparation]
    arguments += ["--data-parallel-size", "2"]
    assert cli.main(["scheduler", *arguments, "--output-json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(scope="module")
def look_us(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What it takes to look at the clock and to prepare nothing."""
    return float(measure(tmp_path_factory.mktemp("nothing"), "none")["prepare_us_mean"])


@pytest.mark.slow
@pytest.mark.parametrize("preparation", ["gpu", "cpu", "none"])
def test_it_measures_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preparation: str, look_us: float
) -> None:
    result = measure(tmp_path, preparation)
    assert result.keys() == TIMES | {"num_seqs", "preparation"}
    assert (result["num_seqs"], result["preparation"]) == (300, preparation)
    assert result["step_us_p99"] >= result["step_us_median"] > 0
    assert (result["prepare_us_mean"] > 5 * look_us) == (preparation != "none")
    assert result["prepare_us_mean"] < result["step_us_mean"]
    output = capsys.readouterr().out
    assert f"{result['step_us_median']:.1f}" in output
    assert "Running requests:" in output


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write --output-json"):
        cli.main(
            ["scheduler", "--num-seqs", "2", "--num-steps", "2", "--output-json", str(tmp_path / "no" / "out.json")]
        )


def test_a_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(scheduler, "_MODULE", "tokenmill_engine.no_such_module")
    with pytest.raises(StartupError, match="ended with status 1"):
        cli.main(["scheduler"])
    assert "no_such_module" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["--num-seqs", "0"], ["--preparation", "tpu"], ["--dtype", "float32"]])
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["scheduler", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err
