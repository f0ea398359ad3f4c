import pytest

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.flag import Group
from tokenmill_server.flags.help import help_text
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED


def test_every_flag_is_in_the_help_under_its_heading() -> None:
    text = help_text()
    positions = [text.index(f"\n{group}:") for group in Group]
    assert positions == sorted(positions)
    for flag in FLAGS.values():
        assert f"--{flag.name}" in text
        assert f"--{flag.name}" in help_text(flag.group.upper())
    assert "--config FILE" in text


def test_topics() -> None:
    assert help_text("SchedulerConfig") == help_text("scheduler")
    assert "--port" not in help_text("Scheduler")
    assert "--data-parallel-size, -dp" in help_text("dp")
    assert "--max-model-len" in help_text("max_model")
    complete = help_text("all")
    assert "VLLM_API_KEY" in complete
    assert "TOKENMILL_MAX_MODEL_LEN" in complete
    assert all(f"--{row.name}" in complete for row in UNSUPPORTED.values())


def test_words_find_flags_that_are_not_supported_too() -> None:
    text = help_text("context-parallel")
    assert "that are not supported yet:\n  --decode-context-parallel-size, -dcp" in text
    assert "Accepted only as 1" in text
    assert "--pipeline-parallel-size, -pp" in help_text("pp")
    assert "--tensor-parallel-size, -tp" in help_text("tp")
    both = help_text("parallel-size")
    assert both.index("--data-parallel-size, -dp") < both.index("--decode-context-parallel-size")
    assert "Accepted, without effect" in help_text("--trust-remote-code")


def test_unknown_topic() -> None:
    with pytest.raises(ConfigError, match="headings Model, Frontend"):
        help_text("xyzzy")


def test_lines_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(len(line) for line in help_text("scheduler").splitlines()) <= 80
