"""The head and headless launchers over real connections, without engine cores: who is let in, what becomes of it."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.server import wait_for
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.control import EngineLost, EngineStalled, MetricsWanted
from tokenmill_engine.messages import Endpoints, EngineReady
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel import head, joining
from tokenmill_server.data_parallel.connection import listen
from tokenmill_server.data_parallel.head import RemoteEngines
from tokenmill_server.data_parallel.joining import Head, join
from tokenmill_server.data_parallel.messages import Facts, HeadStopped, Leaving, MetricFiles, MetricFilesKept
from tokenmill_server.watcher import Readable, Watcher

FACTS = Facts("model", "digest", {"--dtype": "float32"}, {"--max-num-seqs": "4"})
HEAD = DataParallelConfig(size=4, size_local=2, address="127.0.0.1", rpc_port=0, token="secret")


def ready(rank: int, incarnation: int = 0) -> EngineReady:
    return EngineReady(rank, incarnation, Endpoints("tcp://a:1", "tcp://a:2", "key"), 10, 1, 16, 16, "native")


class Rendezvous:
    """A head whose events are handled in a thread; `updates` is what it told."""

    def __init__(self, metrics: Path, config: DataParallelConfig = HEAD, facts: Facts = FACTS) -> None:
        self._watcher = Watcher()
        self.remote = RemoteEngines(config, facts, self._watcher, metrics)
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
        assert done.wait(10)

    def wait_for(self, *updates: object) -> None:
        wait_for(lambda: self.updates == list(updates), 10, f"updates {updates}")

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
            self.remote.tick()
            while self._tasks:
                task, done = self._tasks.pop(0)
                task()
                done.set()
        self.remote.close()
        self.remote.close()
        self._watcher.close()


@pytest.fixture
def rendezvous(tmp_path: Path) -> Iterator[Rendezvous]:
    with_head = Rendezvous(tmp_path)
    yield with_head
    with_head.stop()


@pytest.fixture
def joined(rendezvous: Rendezvous) -> Head:
    return rendezvous.join()


def test_a_launcher_joins_and_tells_of_its_engine_cores(rendezvous: Rendezvous, joined: Head) -> None:
    assert rendezvous.remote.missing == []
    bind = joined.bind()
    assert bind.input == bind.output == "tcp://127.0.0.1:*"
    assert len(bind.key) == 40
    joined.channel.send(ready(2))
    joined.channel.send(ready(3))
    joined.channel.send(EngineStalled(3, 0, 5.0))
    joined.channel.send(EngineLost(2, 0, "killed", restarts=True))
    joined.channel.send(ready(2, 1))
    rendezvous.wait_for(
        ready(2), ready(3), EngineStalled(3, 0, 5.0), EngineLost(2, 0, "killed", restarts=True), ready(2, 1)
    )


def test_launchers_of_one_head_get_one_key_and_of_another_head_another(tmp_path: Path, rendezvous: Rendezvous) -> None:
    keys = [rendezvous.join(rank, 1).bind().key for rank in (2, 3)]
    other = Rendezvous(tmp_path)
    keys.append(other.join().bind().key)
    other.stop()
    assert keys[0] == keys[1] != keys[2]


def test_a_lost_launcher_may_come_back(rendezvous: Rendezvous, joined: Head, caplog: pytest.LogCaptureFixture) -> None:
    """Its engine cores count as later incarnations then, although they begin anew."""
    joined.channel.send(ready(2, 1))
    joined.channel.send(Leaving("told to stop"))
    joined.channel.close()
    lost = EngineLost(2, 1, "engine core 2 is gone with its launcher", restarts=True)
    rendezvous.wait_for(ready(2, 1), lost)
    assert rendezvous.remote.missing == [2, 3]
    assert "the launcher of ranks 2 to 3 at 127.0.0.1:" in caplog.text
    assert "is gone: told to stop" in caplog.text
    again = rendezvous.join()
    again.channel.send(ready(2))
    again.channel.send(ready(3))
    rendezvous.wait_for(ready(2, 1), lost, ready(2, 2), ready(3))
    again.channel.close()
    rendezvous.wait_for(
        ready(2, 1),
        lost,
        ready(2, 2),
        ready(3),
        EngineLost(2, 2, "engine core 2 is gone with its launcher", restarts=True),
        EngineLost(3, 0, "engine core 3 is gone with its launcher", restarts=True),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token": "guess"}, "the head at --data-parallel-address has another --data-parallel-token"),
        ({"token": None}, "the head at --data-parallel-address has another --data-parallel-token"),
        ({"start_rank": 1}, "the head itself runs ranks 0 to 1; use --data-parallel-start-rank 2 or more"),
        ({"start_rank": 3}, "its ranks, from 3 on 2, are not among 0 to 3"),
        ({"size_local": 7}, "its ranks, from 2 on 7, are not among 0 to 3"),
    ],
)
def test_launchers_that_do_not_fit(rendezvous: Rendezvous, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rendezvous.join(**changes)
    assert message in raised.value.message
    assert rendezvous.remote.missing == [2, 3]


def test_a_rank_has_one_launcher(rendezvous: Rendezvous) -> None:
    rendezvous.join(2, 1)
    with pytest.raises(
        ConfigError, match=r"the launcher of rank 2 at .* has joined already; free: rank 3; use another"
    ):
        rendezvous.join(2, 2)
    rendezvous.join(3, 1)
    with pytest.raises(ConfigError, match=r"the launcher of rank 3 at .* has joined already; no rank is free"):
        rendezvous.join(3, 1)


def test_what_differs_is_named(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="the head has --dtype float32 and this launcher bfloat16; give both the same"
    ):
        rendezvous.join(facts=msgspec.structs.replace(FACTS, flags={"--dtype": "bfloat16"}))
    monkeypatch.setattr(joining, "__version__", "0.0.0")
    with pytest.raises(ConfigError, match=r"runs Tokenmill \S+ and this launcher 0\.0\.0; install the same"):
        rendezvous.join()


def test_a_head_without_engine_cores_takes_the_first_launcher_as_the_measure(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, replace(HEAD, size_local=0), msgspec.structs.replace(FACTS, engine_flags={}))
    rendezvous.join(0, 2)
    with pytest.raises(ConfigError, match="--max-num-seqs 4 and this launcher 9"):
        rendezvous.join(2, 2, facts=msgspec.structs.replace(FACTS, engine_flags={"--max-num-seqs": "9"}))
    rendezvous.join(2, 2)
    assert rendezvous.remote.missing == []
    rendezvous.stop()


def test_strangers_are_let_go(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_HANDSHAKE_S", 0.3)
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello", b"\x02\0\0\0{}", b"", b'\x13\0\0\0{"type":"Accepted"}'):
        with socket.create_connection(("127.0.0.1", rendezvous.port), 5) as stranger:
            stranger.sendall(said)
            assert stranger.recv(100) == b""
    with socket.create_connection(("127.0.0.1", rendezvous.port), 5) as stranger:
        body = msgspec.json.encode(MetricFiles({"counter_1.db": b""}))
        stranger.sendall(len(body).to_bytes(4, "little") + body)
        assert b"a launcher registers before it says anything else" in stranger.recv(1000)
    rendezvous.join()


def test_what_a_launcher_says_of_other_ranks_ends_its_connection(rendezvous: Rendezvous, joined: Head) -> None:
    joined.channel.send(ready(1))
    with pytest.raises(ChannelClosedError):
        joined.channel.receive()
    assert rendezvous.updates == []
    rendezvous.join()


def test_metric_files_are_kept(rendezvous: Rendezvous, joined: Head, tmp_path: Path) -> None:
    joined.channel.send(MetricFiles({"counter_5.db": None}))
    assert isinstance(joined.channel.receive(), MetricFilesKept)
    joined.channel.send(MetricFiles({"../x_5.db": None}))
    with pytest.raises(ChannelClosedError):
        joined.channel.receive()
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_fetched_from_all_launchers(rendezvous: Rendezvous) -> None:
    """And from one that dies meanwhile, nothing is expected any more."""
    fetched = threading.Event()
    rendezvous.run(lambda: rendezvous.remote.fetch_metrics(fetched.set))
    assert fetched.is_set(), "nobody is there to answer"
    fetched.clear()
    launchers = [rendezvous.join(rank, 1) for rank in (2, 3)]
    rendezvous.run(lambda: rendezvous.remote.fetch_metrics(fetched.set))
    questions = [launcher.channel.receive() for launcher in launchers]
    assert questions == [MetricsWanted(2), MetricsWanted(2)]
    launchers[0].channel.send(MetricFiles({}, answers=1))
    launchers[0].channel.send(MetricFiles({}))
    assert launchers[0].channel.receive() == MetricFilesKept()
    assert not fetched.is_set()
    launchers[0].channel.send(MetricFiles({}, answers=2))
    assert not fetched.wait(0.1)
    launchers[1].channel.close()
    assert fetched.wait(10)


def test_an_orderly_end_is_told(rendezvous: Rendezvous, joined: Head) -> None:
    rendezvous.run(rendezvous.remote.say_goodbye)
    assert isinstance(joined.channel.receive(), HeadStopped)
    rendezvous.stop()
    with pytest.raises(ChannelClosedError):
        joined.channel.receive()


def test_missing_ranks_are_named_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head, "_REMIND_S", 0.05)
    with caplog.at_level(logging.INFO):
        rendezvous = Rendezvous(tmp_path)
        wait_for(lambda: caplog.text.count("no launcher has ranks 2 to 3 yet") >= 2, 10, "reminders")
        rendezvous.join(2, 1)
        wait_for(lambda: "no launcher has rank 3 yet: start it with --headless" in caplog.text, 10, "a reminder")
        rendezvous.stop()


def test_a_launcher_waits_for_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(joining, "_REMIND_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        port = placeholder.getsockname()[1]
    launcher = replace(HEAD, start_rank=2, headless=True, rpc_port=port)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        future: Future[Head] = pool.submit(join, launcher, FACTS)
        wait_for(lambda: f"still waiting for the head at 127.0.0.1:{port}: Connection refused" in caplog.text, 10, "it")
        rendezvous = Rendezvous(tmp_path, replace(HEAD, rpc_port=port))
        future.result(timeout=10).channel.close()
        rendezvous.stop()


def test_something_else_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        launcher = replace(HEAD, start_rank=2, headless=True, rpc_port=listener.getsockname()[1])
        with pytest.raises(ConfigError, match="is no head of ours; check --data-parallel-address and --data-parallel-"):
            join(launcher, FACTS)
        thread.join()


def test_addresses_where_nobody_can_wait() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(StartupError, match=rf"port {port} on 127\.0\.0\.1 is already in use.*-rpc-port"):
            listen("127.0.0.1", port)
    with pytest.raises(StartupError, match=r"192\.0\.2\.1 is no address of this machine; on the head use one that is"):
        listen("192.0.2.1", 1234)
    with pytest.raises(ConfigError, match=r"--data-parallel-address no\.such\.host\.invalid: "):
        listen("no.such.host.invalid", 1234)


def test_a_vanished_host_is_noticed_soon(rendezvous: Rendezvous, joined: Head) -> None:
    """The kernel asks it often enough, and gives up in time."""
    with socket.socket(fileno=socket.dup(joined.channel.fileno())) as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle, interval, count = (
            connection.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count < 10
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) < 10_000
