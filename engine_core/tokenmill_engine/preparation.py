"""What an engine core does in threads while it waits to be configured: importing libraries takes seconds, part of
which is waiting for disks."""

import dataclasses
import threading
import time
from concurrent.futures import Future
from typing import Any

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.engine import Executor
from tokenmill_engine.outputs import KVCapacity


class Preparation:
    """Imports what an executor needs, from the construction on. The process may end at any time meanwhile."""

    def __init__(self) -> None:
        self._executor_class: Future[Any] = Future()
        threading.Thread(target=self._import, name="import", daemon=True).start()

    def start_executor(self, config: EngineConfig) -> tuple[Executor, KVCapacity]:
        """The executor of this machine, ready, and what it offers.

        Raises:
            TokenmillError: it cannot start.
        """
        began = time.monotonic()
        executor = self._executor_class.result()(config)
        imported = time.monotonic()
        capacity: KVCapacity = executor.initialize()
        return executor, dataclasses.replace(capacity, phases={"import": imported - began, **capacity.phases})

    def _import(self) -> None:
        try:
            from tokenmill_engine.executor.uniproc import UniprocExecutor
        except BaseException as error:
            self._executor_class.set_exception(error)
        else:
            self._executor_class.set_result(UniprocExecutor)
