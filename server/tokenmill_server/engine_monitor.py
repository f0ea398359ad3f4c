"""Metrics that only the launcher can see to, because they are about the ends of processes."""

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineStalled
from tokenmill_engine.messages import EngineReady
from tokenmill_server.engine_table import EngineUpdate


class EngineMonitor:
    """One in a launcher's process. Engine cores should be loading by the time it is built: what it needs takes a while
    to import."""

    def __init__(self, config: EngineConfig, metrics_dir: str) -> None:
        """`metrics_dir`: where all processes of the server keep their metrics."""
        from tokenmill_engine.metric_files import retire_process, write_metrics_to
        from tokenmill_engine.metrics import LauncherMetrics

        write_metrics_to(metrics_dir)
        self._retire_process = retire_process
        self._metrics_dir = metrics_dir
        observability = config.observability
        self._metrics = LauncherMetrics(
            observability.model_name,
            [config.rank_of(engine) for engine in range(config.data_parallel_size)],
            observability.metrics_namespaces if observability.log_stats else (),
        )

    def apply(self, update: EngineUpdate) -> None:
        """Something has become of an engine core."""
        if isinstance(update, EngineDraining):
            return  # it is there as before
        metrics, engine = self._metrics, update.engine
        metrics.engine_stalled[engine].set(isinstance(update, EngineStalled))
        if isinstance(update, EngineReady | EngineLost):
            metrics.engine_up[engine].set(isinstance(update, EngineReady))
        if isinstance(update, EngineReady) and update.incarnation > 0:
            metrics.engine_restarts[engine].inc()

    def process_gone(self, pid: int) -> None:
        """What a child said of its state holds no longer; what it has counted goes on counting."""
        self._retire_process(self._metrics_dir, pid)
