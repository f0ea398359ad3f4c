"""Metrics of the launcher's process, in a process of its own: prometheus-client decides once where values are kept."""

import subprocess
import sys
from pathlib import Path

from tests.support.exposition import samples

SCRIPT = """
import dataclasses, subprocess, sys
import prometheus_client  # as `python -m tokenmill` has, before there is a folder for metrics
from tests.support.api_server import engine_config
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EngineStalled
from tokenmill_engine.ipc.sockets import local_endpoints
from tokenmill_engine.messages import EngineReady
from tokenmill_engine.metric_files import render_metrics
from tokenmill_server.engine_monitor import EngineMonitor

WRITER = '''
from tokenmill_engine.messages import EngineLoad
from tokenmill_engine.metrics import EngineMetrics
metrics = EngineMetrics("smol", 6, 128)
metrics.generation_tokens.inc(5)
metrics.set_load(EngineLoad(num_running=3))
'''
folder = sys.argv[1]
config = dataclasses.replace(engine_config(), data_parallel_size=3, data_parallel_first_rank=5)
monitor = EngineMonitor(config, folder)
for engine in range(3):
    monitor.apply(EngineReady(engine, 0, local_endpoints(folder, engine), 128, 8, 16, 128, "none"))
monitor.apply(EngineStalled(0, 0, 0.0))
monitor.apply(EngineStalled(1, 0, 0.0))
monitor.apply(EngineDraining(0, 0, "goes on for now"))
monitor.apply(EngineLost(1, 0, "gone", restarts=True))
monitor.apply(EngineReady(1, 1, local_endpoints(folder, 1, 1), 128, 8, 16, 128, "none"))
monitor.apply(EngineLost(2, 0, "gone"))
monitor.apply(EngineStalled(1, 1, 0.0))
monitor.apply(EngineRecovered(1, 1))
for _ in range(2):  # two incarnations
    process = subprocess.Popen([sys.executable, "-c", WRITER])
    process.wait()
    monitor.process_gone(process.pid)
print(render_metrics(folder).decode())
"""


def test_states_by_rank_and_counts_that_outlive_processes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    values = samples(done.stdout)

    def states(name: str) -> list[float]:
        return [values[f'tokenmill:{name}{{engine="{rank}",model_name="smol"}}'] for rank in (5, 6, 7)]

    assert states("engine_up") == [1, 1, 0]
    assert states("engine_stalled") == [1, 0, 0]
    assert states("engine_restarts_total") == [0, 1, 0]
    assert values['tokenmill:generation_tokens_total{engine="6",model_name="smol"}'] == 10
    assert not any(name.startswith("tokenmill:num_requests_running") for name in values)
