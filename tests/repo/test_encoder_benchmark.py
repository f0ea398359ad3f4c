"""`benchmarks/encoder_parallel.py`, with a shape that a CPU computes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.encoder_parallel import SETTINGS, table
from tokenmill_engine.config.parallel import check_encoder_parallel, check_tensor_parallel

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", SETTINGS)
def test_shapes_can_be_shared_out(name: str) -> None:
    setting = SETTINGS[name]
    model = setting.model()
    assert model.media is not None
    for size in setting.sizes:
        check_tensor_parallel(model.architecture, size)
        check_encoder_parallel(model.media.vision, "weights", size)


def test_modes_stand_beside_each_other() -> None:
    figures = {"ttft_ms": 30.0, "burst_ttft_ms": 40.0}
    rows = [
        {"images": "two", "workers": 1, "mode": "alone", "encoder_ms": 9.0, **figures},
        {"images": "two", "workers": 2, "mode": "weights", "encoder_ms": 8.0, **figures},
        {"images": "two", "workers": 2, "mode": "data", "encoder_ms": 4.0, **figures},
    ]
    *_, alone, together = table(rows).splitlines()
    assert alone.split() == ["two", "1", "9.0", "30.0", "40.0"]
    assert together.split() == ["two", "2", "8.0", "4.0", "0.50", "30.0", "30.0", "1.00", "40.0", "40.0", "1.00"]


@pytest.mark.slow
def test_all_figures_of_a_tiny_shape(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.encoder_parallel", "--setting", "cpu", "--output", str(output)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert [(row["workers"], row["mode"]) for row in rows[::3]] == [(1, "alone"), (2, "weights"), (2, "data")]
    assert all(row[figure] > 0 for row in rows for figure in ("encoder_ms", "ttft_ms", "burst_ttft_ms"))
    for name in SETTINGS["cpu"].images:
        assert name in done.stdout
