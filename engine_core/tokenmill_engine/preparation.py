"""What an engine core does in threads from its first moment on, while its configuration arrives: importing libraries
takes seconds, part of which is waiting for disks, and so does setting up a GPU.
"""

import dataclasses
import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tokenmill_engine.config.device import may_have_gpu, open_cuda_context
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.engine import Executor
from tokenmill_engine.outputs import KVCapacity


class Preparation:
    """Imports what an executor needs, from the construction on. The process may end at any time meanwhile."""

    def __init__(self, *, may_use_gpu: bool) -> None:
        """`may_use_gpu`: the first visible one, if there is any, is set up as well."""
        self._executor_class: Future[Any] = Future()
        self._gpu_error: BaseException | None = None
        """Why what GPUs need could not be imported. Set before `_executor_class` is."""
        on_gpu = may_use_gpu and may_have_gpu()
        if on_gpu:
            _begin("context", open_cuda_context)
        _begin("import", lambda: self._import(on_gpu))

    def start_executor(self, config: EngineConfig) -> tuple[Executor, KVCapacity]:
        """The executor of this machine, ready, and what it offers.

        Raises:
            TokenmillError: it cannot start.
            Exception: something that it needs cannot be imported. What only GPUs need does not matter on the CPU.
        """
        began = time.monotonic()
        executor_class = self._executor_class.result()
        if self._gpu_error is not None and config.device.kind == "cuda":
            raise self._gpu_error
        executor = executor_class(config)
        imported = time.monotonic()
        capacity: KVCapacity = executor.initialize()
        return executor, dataclasses.replace(capacity, phases={"import": imported - began, **capacity.phases})

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


def _begin(name: str, work: Callable[[], object]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
