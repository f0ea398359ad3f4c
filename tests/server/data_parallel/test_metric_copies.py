"""Values of other machines' processes, next to ours."""

import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.support.exposition import samples
from tokenmill_engine.metric_files import render_metrics
from tokenmill_server.data_parallel.metric_copies import MetricFilesSource, drop_gauges, keep

WRITER = """
import sys
from tokenmill_engine.messages import EngineLoad
from tokenmill_engine.metrics import EngineMetrics
rank, tokens = int(sys.argv[1]), int(sys.argv[2])
metrics = EngineMetrics("m", rank, 4096)
metrics.generation_tokens.inc(tokens)
metrics.set_load(EngineLoad(num_running=tokens))
metrics.request_generation_tokens.observe(tokens)
"""


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    return here, there


def write(folder: Path, rank: int, tokens: int) -> None:
    """The metrics of an engine core that has lived."""
    environment = {"PROMETHEUS_MULTIPROC_DIR": str(folder), "PATH": ""}
    subprocess.run([sys.executable, "-c", WRITER, str(rank), str(tokens)], check=True, env=environment)


def value(folder: Path, series: str, rank: int) -> float:
    """What /metrics of the head says."""
    page = samples(render_metrics(str(folder)).decode())
    return page[f'tokenmill:{series}{{engine="{rank}",model_name="m"}}']


def test_the_head_shows_what_processes_elsewhere_count(folders: tuple[Path, Path]) -> None:
    here, there = folders
    write(here, 0, 3)
    source = MetricFilesSource(there)
    assert source.changes() == {}
    write(there, 1, 5)
    changes = source.changes()
    assert len(changes) == 3
    assert sum(len(content or b"") for content in changes.values()) < 20_000
    keep(here, 7, changes)
    assert source.changes() == {}
    assert value(here, "generation_tokens_total", 0) == 3
    assert value(here, "generation_tokens_total", 1) == 5
    assert value(here, "request_generation_tokens_count", 1) == 1
    assert value(here, "num_requests_running", 1) == 5


def test_counters_outlive_a_launcher_and_gauges_do_not(folders: tuple[Path, Path]) -> None:
    here, there = folders
    write(there, 1, 5)
    keep(here, 1, MetricFilesSource(there).changes())
    drop_gauges(here, 1)
    (there / "again").mkdir()
    write(there / "again", 1, 2)
    keep(here, 2, MetricFilesSource(there / "again").changes())
    assert value(here, "generation_tokens_total", 1) == 7
    assert value(here, "num_requests_running", 1) == 2


def test_a_file_that_goes_away_there_goes_away_here(folders: tuple[Path, Path]) -> None:
    here, there = folders
    write(there, 1, 5)
    source = MetricFilesSource(there)
    keep(here, 1, source.changes())
    gauges = next(there.glob("gauge_*.db"))
    gauges.unlink()
    changes = source.changes()
    assert changes == {gauges.name: None}
    keep(here, 1, changes)
    assert not list(here.glob("gauge_*.db"))
    assert len(list(here.glob("*.db"))) == 2


@pytest.mark.parametrize("name", ["../counter_1.db", "counter_1.db/..", "counter_x.db", "passwd", "counter_1.db.sh"])
def test_nothing_else_is_written(folders: tuple[Path, Path], name: str) -> None:
    with pytest.raises(ValueError, match="is no metric file"):
        keep(folders[0], 1, {name: zlib.compress(b"\x04\0\0\0")})
    with pytest.raises(ValueError, match="Error -3"):
        keep(folders[0], 1, {"counter_1.db": b"not compressed"})
    assert list(folders[0].parent.rglob("*.*")) == []
