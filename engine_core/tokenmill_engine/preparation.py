"""What an engine core does from its first moment on, while its configuration arrives: importing libraries takes
seconds, part of which is waiting for disks, and so does setting up a GPU. Worker processes do that themselves.
"""

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tokenmill_engine.config.device import may_have_gpu
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.engine import Executor
from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.ipc.control import EngineStart
from tokenmill_engine.ipc.shared_objects import SharedObjects
from tokenmill_engine.outputs import KVCapacity
from tokenmill_engine.structured_output.backends import begin_setup
from tokenmill_engine.worker.gpu_start import begin_context, import_cuda


class Preparation:
    """Imports what an executor needs, from the construction on. The process may end at any time meanwhile."""

    def __init__(self, *, may_use_gpu: bool, num_workers: int = 0, segments: Sequence[int] = ()) -> None:
        """`may_use_gpu`: the first visible one, if there is any, is set up as well. `num_workers`: as many worker
        processes are started instead, which do all of that themselves; 0 if this process is to compute. `segments`:
        descriptors of memory that API servers share, by their numbers."""
        self._segments = segments
        self._executor_class: Future[Any] = Future()
        self._gpu_error: BaseException | None = None
        """Why what GPUs need could not be imported. Set before `_executor_class` is."""
        self._pool: WorkerPool | StartupError | None = None
        self._on_gpu = may_use_gpu and may_have_gpu()
        if num_workers:
            self._pool = _pool_or_error(num_workers, self._on_gpu, segments)
        else:
            self._begin_imports()

    @property
    def num_segments(self) -> int:
        """API servers whose memory the executor reads."""
        return len(self._segments)

    def start_executor(
        self, start: EngineStart, on_lost: Callable[[EngineDeadError], None]
    ) -> tuple[Executor, KVCapacity]:
        """The executor of this machine, ready, and what it offers. `on_lost` is called in another thread when a worker
        process ends.

        Raises:
            TokenmillError: it cannot start.
            Exception: something that it needs cannot be imported. What only GPUs need does not matter on the CPU.
        """
        if start.config.parallel.executor == "mp":
            return self._start_workers(start, on_lost)
        if self._pool is not None:
            self._end_pool()
            self._begin_imports()
        return self._start_here(start.config)

    def _start_here(self, config: EngineConfig) -> tuple[Executor, KVCapacity]:
        began = time.monotonic()
        executor_class = self._executor_class.result()
        if self._gpu_error is not None and config.device.kind == "cuda":
            raise self._gpu_error
        executor = executor_class(config, shared=SharedObjects(self._segments))
        imported = time.monotonic()
        begin_setup(config)
        capacity: KVCapacity = executor.initialize()
        return executor, dataclasses.replace(capacity, phases={"import": imported - began, **capacity.phases})

    def _start_workers(
        self, start: EngineStart, on_lost: Callable[[EngineDeadError], None]
    ) -> tuple[Executor, KVCapacity]:
        size = start.config.parallel.world_size
        if isinstance(self._pool, WorkerPool) and self._pool.size != size:
            self._end_pool()
        pool = self._pool or _pool_or_error(size, self._on_gpu, self._segments)
        if isinstance(pool, StartupError):
            raise pool
        pool.gives_up = start.gives_up
        store_path = os.path.join(start.run_dir, f"workers-{start.engine}.{start.incarnation}")
        begin_setup(start.config)
        executor = MultiprocExecutor(start.config, pool, start.config.rank_of(start.engine), store_path, on_lost)
        return executor, executor.initialize()

    def _end_pool(self) -> None:
        """It was started for another configuration than came."""
        if isinstance(self._pool, WorkerPool):
            self._pool.stop()
        self._pool = None

    def _begin_imports(self) -> None:
        if self._on_gpu:
            begin_context(0)
        threading.Thread(target=self._import, args=(self._on_gpu,), name="import", daemon=True).start()

    def _import(self, on_gpu: bool) -> None:
        try:
            if on_gpu:
                try:
                    import_cuda()
                except BaseException as error:
                    self._gpu_error = error
            from tokenmill_engine.executor.uniproc import UniprocExecutor
        except BaseException as error:
            self._executor_class.set_exception(error)
        else:
            self._executor_class.set_result(UniprocExecutor)


def _pool_or_error(size: int, may_use_gpus: bool, segments: Sequence[int]) -> WorkerPool | StartupError:
    """The error is told when somebody listens."""
    try:
        return WorkerPool(size, may_use_gpus=may_use_gpus, segments=segments)
    except StartupError as error:
        return error
