"""A head that waits for headless launchers, over real connections and without engine cores."""

import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.ipc.control import Ping, Pulse
from tokenmill_engine.ipc.sockets import public_key
from tokenmill_engine.messages import Endpoints, EngineReady
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel.connection import send_if_open
from tokenmill_server.data_parallel.head import RemoteEngines
from tokenmill_server.data_parallel.joining import Head, join
from tokenmill_server.data_parallel.messages import Facts, FromHead
from tokenmill_server.watcher import Readable, Watcher

FACTS = Facts("model", "digest", {"--dtype": "float32"}, {"--max-num-seqs": "4"})
HEAD = DataParallelConfig(size=4, size_local=2, address="127.0.0.1", rpc_port=0, token="secret")


def ready(rank: int, incarnation: int = 0) -> EngineReady:
    """As its launcher says it."""
    return EngineReady(rank, incarnation, Endpoints("tcp://a:1", "tcp://a:2"), 10, 1, 16, 16, "native")


def usable(launcher: Head, rank: int, incarnation: int = 0) -> EngineReady:
    """The same as the head says it, which knows the key without being told."""
    told = ready(rank, incarnation)
    key = public_key(launcher.secret_key)
    assert len(key) == 40
    return msgspec.structs.replace(told, endpoints=msgspec.structs.replace(told.endpoints, key=key))


def say(stranger: socket.socket, *messages: msgspec.Struct | bytes) -> None:
    """Whole frames of messages, or of other bytes."""
    for message in messages:
        body = message if isinstance(message, bytes) else msgspec.json.encode(message)
        stranger.sendall(len(body).to_bytes(4, "little") + body)


def everything(stranger: socket.socket) -> bytes:
    """What the head says until it ends the connection."""
    stranger.settimeout(PATIENCE_S)
    said = bytearray()
    while data := stranger.recv(1 << 16):
        said += data
    return bytes(said)


def hear(launcher: Head) -> FromHead:
    """What the head says next to a launcher, which shows that it lives meanwhile."""
    while isinstance(message := launcher.channel.receive(), Ping):
        send_if_open(launcher.channel, Pulse())
    return message


class Rendezvous:
    """A head whose events are handled in a thread; `updates` is what it told."""

    def __init__(
        self, metrics: Path, config: DataParallelConfig = HEAD, facts: Facts = FACTS, gives_up: bool = True
    ) -> None:
        self._watcher = Watcher()
        self.remote = RemoteEngines(config, facts, self._watcher, metrics, gives_up)
        self.port = int(self.remote.address.rpartition(":")[2])
        self.updates: list[Any] = []
        self._tasks: list[tuple[Callable[[], None], threading.Event]] = []
        self._joined: list[Head] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def launcher(self, start_rank: int = 2, size_local: int = 2, **changes: Any) -> DataParallelConfig:
        return replace(
            HEAD,
            start_rank=start_rank,
            size_local=size_local,
            headless=True,
            **{"rpc_port": self.port, **changes},
        )

    def join(self, start_rank: int = 2, size_local: int = 2, facts: Facts = FACTS, **changes: Any) -> Head:
        """As such a launcher does. Its connection ends with the head's."""
        launcher = join(self.launcher(start_rank, size_local, **changes), facts)
        self._joined.append(launcher)
        return launcher

    def run(self, task: Callable[[], None]) -> None:
        """Runs `task` in the head's thread."""
        done = threading.Event()
        self._tasks.append((task, done))
        assert done.wait(PATIENCE_S)

    @property
    def missing(self) -> list[int]:
        """What the head says of ranks that no launcher has, between two of its events."""
        missing: list[int] = []
        self.run(lambda: missing.extend(self.remote.missing))
        return missing

    def stranger(self) -> socket.socket:
        """A connection to the head over which nothing was said yet."""
        return socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)

    def wait_for(self, *updates: object) -> None:
        wait_for(lambda: self.updates == list(updates), PATIENCE_S, f"updates {updates}")

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        for launcher in self._joined:
            launcher.channel.close()

    def _run(self) -> None:
        while not self._stopping:
            for event in self._watcher.wait(0.02):
                assert isinstance(event, Readable)
                self.updates += self.remote.handle(event)
            self.updates += self.remote.tick()
            while self._tasks:
                task, done = self._tasks.pop(0)
                task()
                done.set()
        self.remote.close()
        self.remote.close()
        self._watcher.close()
