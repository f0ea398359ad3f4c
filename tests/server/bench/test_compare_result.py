import json
from pathlib import Path

import pytest

from tokenmill_server.bench.compare_plan import DEFAULT, Load, Row, Session
from tokenmill_server.bench.compare_report import Measurement
from tokenmill_server.bench.compare_result import Result
from tokenmill_server.bench.compare_sides import Deadline

LOADS = (Load("a", "decode", 1, 1, 1, expected_s=3.0), Load("b", "decode", 1, 1, 1, expected_s=4.0))
OURS = Session("ours", "8b", LOADS, range(2), cache="empty")
PEER = Session("peer", "8b", LOADS, range(2), cache="empty")


@pytest.fixture
def result(tmp_path: Path) -> Result:
    rows = [Row("a, ms", "a", "step_ms")]
    return Result(tmp_path / "result.json", "offline", 2, 1, rows, "Peer", Deadline(60.0), card="a card")


def test_every_step_is_on_disk(result: Result) -> None:
    result.add(Measurement("ours", DEFAULT, "a", 0, {"step_ms": 2.0}, "task"))
    assert json.loads(result.path.read_text())["table"][-1] == "| a, ms | 2 |  |  |"
    result.add(Measurement("peer", DEFAULT, "a", 0, {"step_ms": 4.0}, "task"))
    result.fail("peer: gone")
    written = json.loads(result.path.read_text())
    assert written["table"][-1] == "| a, ms | 2 | 4 | 0.500 |"
    assert written["failures"] == ["peer: gone"]
    assert [each["figures"]["step_ms"] for each in written["measurements"]] == [2.0, 4.0]
    assert [path.name for path in result.path.parent.iterdir()] == ["result.json"]


def test_time_is_expected_until_it_is_known(result: Result) -> None:
    assert result.round_s(OURS) == 7.0
    expected_s = result.needed_s([OURS, PEER])
    result.load_times_s["ours", "a"] = 1.0
    assert result.round_s(OURS) == 5.0
    assert result.needed_s([OURS, PEER]) == expected_s - 2.0
    result.start_times_s["peer", "8b"] = 1000.0
    assert result.needed_s([PEER]) == pytest.approx(1000.0 + 7.0 + 4.0)


def test_a_start_with_caches_and_a_session_without_rounds_take_less(result: Result) -> None:
    result.start_times_s["peer", "8b"] = 100.0
    kept = Session("peer", "8b", LOADS, range(2, 2), cache="kept")
    assert result.needed_s([kept]) == pytest.approx(75.0 + 4.0)
