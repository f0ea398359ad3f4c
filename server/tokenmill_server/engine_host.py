"""Runs engine cores for a program that is no server: child processes, the client and its event loop, in one thread.

The thread starts the children itself, because the kernel ends them when the thread that started them ends.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.ipc.control import EngineLost
from tokenmill_engine.messages import EngineReady
from tokenmill_server.balancing.load_balancer import make_balancer
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.engine_table import EngineTable
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.run_dir import RunDir
from tokenmill_server.supervisor import EngineSupervisor
from tokenmill_server.text_generator import TextGenerator
from tokenmill_server.watcher import Exited, Said, Watcher

T = TypeVar("T")

_SETTLE_S = 1.0
"""How long calls in other threads get to hear of the end."""
_CLOSED = "the engine was shut down"


class EngineHost:
    """Engine cores and a `TextGenerator` for them. `generator` belongs to the thread: use it from `run` only."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, segments: Sequence[int] = ()) -> None:
        """`segments`: the descriptor of memory that this process shares with the engine cores, if it does; the
        caller's, to be closed after `close`."""
        self._began = time.monotonic()
        self._config = config
        self._tokenizer = tokenizer
        self._segments = segments
        self._started: concurrent.futures.Future[list[EngineReady]] = concurrent.futures.Future()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run_thread, name="tokenmill-engine-host", daemon=True)
        self.generator: TextGenerator
        """There from `start` on."""

    def start(self) -> list[EngineReady]:
        """Starts the engine cores and waits until all can serve.

        Raises:
            StartupError: one could not start; nothing is left running.
            EngineDeadError: one died as soon as it had started; nothing is left running either.
        """
        self._thread.start()
        try:
            return self._started.result()
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the thread's event loop and waits for its result. An interrupt cancels it.

        Raises:
            EngineDeadError: the engine is gone, or what `work` raises.
        """
        if self._loop is None or self._death is not None or not self._thread.is_alive():
            work.close()
            raise EngineDeadError(self._death or _CLOSED)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
        except concurrent.futures.CancelledError:
            raise EngineDeadError(self._death or _CLOSED) from None
        finally:
            del future, work  # what it raised refers to this function, and would live on with all that it came through

    def close(self) -> None:
        """Ends the engine cores and the thread. May be called twice, and from any thread."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join()

    # --- in the thread --------------------------------------------------------------------------------------------

    def _run_thread(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        with Watcher() as watcher, RunDir() as run_dir:
            engines = EngineSupervisor(str(run_dir.path), watcher, self._began)
            table = EngineTable(self._config.data_parallel_size)
            client = EngineClient(client=0, incarnation=0, balancer=make_balancer(self._config))
            self.generator = TextGenerator(client, self._tokenizer)
            try:
                ready = self._watch(watcher, engines, table)
                # Metric files are a server's affair, and ours would mix with those of the program around us.
                environment = {key: text for key, text in os.environ.items() if key != "PROMETHEUS_MULTIPROC_DIR"}
                parallel = self._config.parallel
                engines.spawn(
                    self._config.data_parallel_size,
                    self._config.device.kind,
                    environment,
                    num_workers=parallel.world_size if parallel.executor == "mp" else 0,
                    segments=self._segments,
                )
                engines.configure(self._config)
                await self._until(ready, self._stop)
                await self._generate_until_stopped(table.ready, self._stop)
            finally:
                client.close()
                self._loop.remove_reader(watcher.fileno())
                engines.stop()

    async def _generate_until_stopped(self, ready: list[EngineReady], stop: asyncio.Event) -> None:
        for engine in ready:
            await self.generator.connect(engine)
        self._started.set_result(ready)
        await stop.wait()
        self._death = self._death or _CLOSED
        self.generator.fail_all(EngineDeadError(self._death))
        calls = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if calls:
            await asyncio.wait(calls, timeout=_SETTLE_S)

    def _watch(self, watcher: Watcher, engines: EngineSupervisor, table: EngineTable) -> "asyncio.Future[None]":
        """A future that is done once all engine cores can serve, or raises why they cannot."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def on_events() -> None:
            for event in watcher.wait(0):
                assert isinstance(event, Said | Exited)
                try:
                    update = engines.handle(event)
                except StartupError as error:
                    if not ready.done():
                        ready.set_exception(error)
                    continue
                if isinstance(update, EngineReady):
                    table.apply(update)
                elif isinstance(update, EngineLost) and not ready.done():
                    ready.set_exception(EngineDeadError(update.message))
                elif isinstance(update, EngineLost) and self._death is None:
                    self._on_death(update)
            if table.is_settled and not ready.done():
                ready.set_result(None)

        loop.add_reader(watcher.fileno(), on_events)
        return ready

    def _on_death(self, lost: EngineLost) -> None:
        """Everything open fails. One dead engine core ends the host: what it held cannot be had any more."""
        self._death = lost.message
        for engine in range(self._config.data_parallel_size):
            self.generator.engine_lost(EngineLost(engine, lost.incarnation, lost.message))
        if self._stop is not None:
            self._stop.set()

    @staticmethod
    async def _until(ready: "asyncio.Future[None]", stop: asyncio.Event) -> None:
        """Waits for `ready`. Raises EngineDeadError if `stop` comes first."""
        stopping = asyncio.ensure_future(stop.wait())
        both: set[asyncio.Future[Any]] = {ready, stopping}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not ready.done():
            raise EngineDeadError(_CLOSED)
        ready.result()
