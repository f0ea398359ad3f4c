"""What an engine core does from its first moment on, while its configuration arrives: importing libraries takes
seconds, part of which is waiting for disks, and so does setting up a GPU. Worker processes do that themselves.
"""

import dataclasses
import importlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tokenmill_engine.config.device import may_have_gpu, open_cuda_context
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.engine import Executor
from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool
from tokenmill_engine.ipc.control import EngineStart
from tokenmill_engine.outputs import KVCapacity


class Preparation:
    """Imports what an executor needs, from the construction on. The process may end at any time meanwhile."""

    def __init__(self, *, may_use_gpu: bool, num_workers: int = 0) -> None:
        """`may_use_gpu`: the first visible one, if there is any, is set up as well. `num_workers`: as many worker
        processes are started instead; 0 if this process is to compute, as it does on a GPU instead of a single one."""
        self._executor_class: Future[Any] = Future()
        self._gpu_error: BaseException | None = None
        """Why what GPUs need could not be imported. Set before `_executor_class` is."""
        self._pool: WorkerPool | StartupError | None = None
        self._on_gpu = may_use_gpu and may_have_gpu()
        if num_workers > 1 or (num_workers and not self._on_gpu):
            self._pool = _pool_or_error(num_workers)
        else:
            self._begin_imports()

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
        executor = executor_class(config)
        imported = time.monotonic()
        capacity: KVCapacity = executor.initialize()
        return executor, dataclasses.replace(capacity, phases={"import": imported - began, **capacity.phases})

    def _start_workers(
        self, start: EngineStart, on_lost: Callable[[EngineDeadError], None]
    ) -> tuple[Executor, KVCapacity]:
        size = start.config.parallel.world_size
        if isinstance(self._pool, WorkerPool) and self._pool.size != size:
            self._end_pool()
        pool = self._pool or _pool_or_error(size)
        if isinstance(pool, StartupError):
            raise pool
        store_path = os.path.join(start.run_dir, f"workers-{start.engine}.{start.incarnation}")
        executor = MultiprocExecutor(start.config, pool, start.config.rank_of(start.engine), store_path, on_lost)
        return executor, executor.initialize()

    def _end_pool(self) -> None:
        """It was started for another configuration than came."""
        if isinstance(self._pool, WorkerPool):
            self._pool.stop()
        self._pool = None

    def _begin_imports(self) -> None:
        if self._on_gpu:
            _begin("context", open_cuda_context)
        _begin("import", lambda: self._import(self._on_gpu))

    def _import(self, on_gpu: bool) -> None:
        try:
            if on_gpu:
                self._import_for_gpu()
            from tokenmill_engine.executor.uniproc import UniprocExecutor
        except BaseException as error:
            self._executor_class.set_exception(error)
        else:
            self._executor_class.set_result(UniprocExecutor)

    def _import_for_gpu(self) -> None:
        try:
            import triton

            # Part of the name of every compiled kernel: a hash of all of Triton, computed beside the next imports.
            _begin("hash", getattr(triton.runtime.cache, "triton_key", int))
            importlib.import_module("tokenmill_engine.worker.cuda")
        except BaseException as error:
            self._gpu_error = error


def _pool_or_error(size: int) -> WorkerPool | StartupError:
    """The error is told when somebody listens."""
    try:
        return WorkerPool(size)
    except StartupError as error:
        return error


def _begin(name: str, work: Callable[[], object]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
