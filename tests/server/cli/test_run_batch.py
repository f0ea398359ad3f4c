"""The command line of `tokenmill run-batch`: what is refused before anything starts."""

from pathlib import Path

import pytest

from tokenmill_server.cli import main as cli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-concurrency", "0"], "--max-concurrency must be from 1 to 4096; got 0"),
        (["--overwrite", "--retry-failed"], "--overwrite contradicts --retry-failed"),
        (["--url", "0.0.0.0"], "--url and --port need --enable-metrics"),
        (["--api-key", "k"], "--api-key needs --base-url"),
        (["--base-url", "http://h", "--dtype", "float32"], "--dtype is for a server that the batch starts"),
        (["--base-url", "http://h", "--enable-metrics"], "--enable-metrics is for a server that the batch starts"),
        (["--base-url", "file:///h"], "--base-url must be http"),
        (["--no-such-flag"], "unknown flag --no-such-flag"),
        (["--max_num_seqs", "-1"], "--max-num-seqs must be"),
        (["--uds", "/x"], "--uds is about serving others; leave it out"),
        (["--ssl-certfile", "x"], "--ssl-certfile is about serving others"),
        (["--output_file", "in.jsonl"], "--output-file is the input"),
        (["--input-file", "none.jsonl"], "cannot read none.jsonl: No such file"),
        (["--output-file", "README"], "line 1 of README is no answer of a batch"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    Path("in.jsonl").write_text("nonsense\n")
    Path("README").write_text("Not an output.\n")
    assert cli.main(["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", *arguments]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_flags_from_a_file_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    Path("config.yaml").write_text("api-key: secret\n")
    Path("in.jsonl").touch()
    assert cli.main(["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--config", "config.yaml"]) == 1
    assert "api-key in config.yaml is about serving others" in capsys.readouterr().err


def test_a_batch_of_bad_lines_needs_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    Path("in.jsonl").write_text("nonsense\n\n{}\n")
    assert cli.main(["run-batch", "-i", "in.jsonl", "-o", "-", "--disable-tqdm"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "2 lines are answered; 2 failed\n"
    assert captured.out.count("invalid_line") == 2
