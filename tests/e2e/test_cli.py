"""`tokenmill chat` and `tokenmill complete` against the embedded model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import CONTROL_PROMPT, Server
from tokenmill_server.cli import main as cli

pytestmark = pytest.mark.slow

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8")
)[0]


def test_chat_and_complete_print_the_whole_answer(smollm_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ["--url", f"{smollm_server.url}/v1", "--temperature", "0", "--max-tokens"]
    assert cli.main(["chat", *greedy, str(len(REFERENCE["fp32_ids"])), "-q", REFERENCE["prompt"]]) == 0
    assert capsys.readouterr().out == f"{REFERENCE['fp32_text']}\n"
    assert cli.main(["complete", *greedy, "8", "--stats", "--quick", CONTROL_PROMPT]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{smollm_server.text(max_tokens=8)}\n"
    assert "pieces/s" in captured.err
    assert cli.main(["complete", *greedy, "0", "-q", CONTROL_PROMPT]) == 1
    assert "max_tokens must be at least 1" in capsys.readouterr().err
