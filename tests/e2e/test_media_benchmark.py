"""`benchmarks/media.py` with few requests: what it counts, not what it times."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
_LIMIT_S = 300.0


def rows_of(part: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.media", part, "--scale", "0.1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    rows: list[dict[str, Any]] = json.loads(line)["rows"]
    assert all(f"| {title} |" in done.stdout for title in rows[0])
    return rows


def test_a_conversation_prepares_and_sends_its_images_once() -> None:
    first, second = rows_of("conversation")
    assert (first["with caches, prepared"], second["with caches, prepared"]) == (4, 0)
    assert second["without, prepared"] == 4
    pixels = 4 * 640 * 480 * 3
    assert all(pixels < row["without, bytes to engine"] < 1.1 * pixels for row in (first, second))
    assert pixels < first["with caches, bytes to engine"] < 1.1 * pixels
    assert second["with caches, bytes to engine"] < 0.01 * pixels


def test_times_are_told() -> None:
    for part in ("ttft", "delay"):
        rows = rows_of(part)
        assert len(rows) == 2
        assert all(value > 0 for row in rows for value in list(row.values())[1:])


def test_parts_that_are_not_there() -> None:
    command = [sys.executable, "-m", "benchmarks.media", "everything"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    assert done.returncode == 2
    assert "there is no part everything" in done.stderr
