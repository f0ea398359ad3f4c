"""The head and headless launchers over real connections, without engine cores: who is let in, what becomes of it."""

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.rendezvous import FACTS, HEAD, Rendezvous, everything, hear, ready, say, usable
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.control import EngineLost, EngineStalled, MetricsWanted
from tokenmill_server.data_parallel import head, joining, reception
from tokenmill_server.data_parallel.authentication import new_nonce
from tokenmill_server.data_parallel.connection import listen
from tokenmill_server.data_parallel.joining import Head, join
from tokenmill_server.data_parallel.messages import (
    HeadStopped,
    JoinRequest,
    Leaving,
    MetricFiles,
    MetricFilesKept,
    Refused,
    Registration,
)
from tokenmill_server.version import __version__


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """With strangers, who may say something when the machine lets them."""
    monkeypatch.setattr(reception, "_SILENT_S", PATIENCE_S)


@pytest.fixture
def joined(rendezvous: Rendezvous) -> Head:
    return rendezvous.join()


def test_a_launcher_joins_and_tells_of_its_engine_cores(rendezvous: Rendezvous, joined: Head) -> None:
    assert rendezvous.missing == []
    bind = joined.bind()
    assert bind.input == bind.output == "tcp://127.0.0.1:*"
    assert len(bind.key) == 40
    joined.channel.send(ready(2))
    joined.channel.send(ready(3))
    joined.channel.send(EngineStalled(3, 0, 5.0))
    joined.channel.send(EngineLost(2, 0, "killed", restarts=True))
    joined.channel.send(ready(2, 1))
    rendezvous.wait_for(
        usable(joined, 2),
        usable(joined, 3),
        EngineStalled(3, 0, 5.0),
        EngineLost(2, 0, "killed", restarts=True),
        usable(joined, 2, 1),
    )


def test_a_remote_loss_is_never_final(rendezvous: Rendezvous, joined: Head) -> None:
    """A launcher gives up on an engine core, but another launcher may come."""
    joined.channel.send(ready(2))
    joined.channel.send(EngineLost(2, 0, "engine core 2 was killed", restarts=False))
    rendezvous.wait_for(
        usable(joined, 2),
        EngineLost(2, 0, "engine core 2 was killed, and its launcher does not start it again", may_return=True),
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
    lost = EngineLost(2, 1, "engine core 2 is gone with its launcher", may_return=True)
    first = usable(joined, 2, 1)
    rendezvous.wait_for(first, lost)
    assert rendezvous.missing == [2, 3]
    assert "the launcher of ranks 2 to 3 at 127.0.0.1:" in caplog.text
    assert "is gone: told to stop" in caplog.text
    again = rendezvous.join()
    again.channel.send(ready(2))
    again.channel.send(ready(3))
    rendezvous.wait_for(first, lost, usable(again, 2, 2), usable(again, 3))
    again.channel.close()
    rendezvous.wait_for(
        first,
        lost,
        usable(again, 2, 2),
        usable(again, 3),
        EngineLost(2, 2, "engine core 2 is gone with its launcher", may_return=True),
        EngineLost(3, 0, "engine core 3 is gone with its launcher", may_return=True),
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
    assert rendezvous.missing == [2, 3]


def test_a_rank_has_one_launcher(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_PATIENCE_S", 0.2)
    rendezvous.join(2, 1)
    with pytest.raises(
        ConfigError, match=r"the launcher of rank 2 at .* has joined already; free: rank 3; use another"
    ):
        rendezvous.join(2, 2)
    rendezvous.join(3, 1)
    with pytest.raises(
        ConfigError, match=r"the launcher of rank 3 at .* has joined already; no rank is free; stop that"
    ):
        rendezvous.join(3, 1)


def test_a_launcher_that_replaces_another_waits_until_that_one_is_known_to_be_gone(
    rendezvous: Rendezvous, joined: Head, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        future: Future[Head] = pool.submit(rendezvous.join)
        wait_for(
            lambda: "which may pass within seconds: the launcher of ranks 2 to 3" in caplog.text,
            PATIENCE_S,
            "a refusal",
        )
        assert not future.done()
        joined.channel.close()
        again = future.result(PATIENCE_S)
    again.channel.send(ready(2))
    rendezvous.wait_for(usable(again, 2))


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
    assert rendezvous.missing == []
    rendezvous.stop()


def test_strangers_are_let_go(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_SILENT_S", 0.3)  # for the fourth, which says nothing
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello", b"\x02\0\0\0{}", b"", b'\x13\0\0\0{"type":"Accepted"}'):
        with rendezvous.stranger() as stranger:
            stranger.sendall(said)
            assert stranger.recv(100) == b""
    monkeypatch.setattr(reception, "_SILENT_S", PATIENCE_S)
    with rendezvous.stranger() as stranger:
        say(stranger, MetricFiles({"counter_1.db": b""}))
        assert b"a launcher registers before it says anything else" in everything(stranger)
    rendezvous.join()


def test_a_stranger_that_asks_again_and_again_holds_up_nobody(rendezvous: Rendezvous) -> None:
    """Nor does one that reads no answer."""
    with (
        rendezvous.stranger() as reading,
        rendezvous.stranger() as deaf,
    ):
        say(reading, JoinRequest(__version__, b"1"), JoinRequest(__version__, b"2"))
        answers = everything(reading)
        assert answers.count(b"Challenge") == 1
        assert b"a launcher asks to join once" in answers
        with contextlib.suppress(ConnectionError):
            for _ in range(50_000):
                say(deaf, JoinRequest(__version__, b"1"))
        rendezvous.join()


NUMBERS = {"start_rank": 2, "num_ranks": 1, "facts": msgspec.to_builtins(FACTS), "proof": "", "type": "Registration"}


@pytest.mark.parametrize(
    "said",
    [
        msgspec.json.encode(NUMBERS | {"num_ranks": 2**64 - 1}),
        msgspec.json.encode(NUMBERS | {"start_rank": 2**63 - 1, "num_ranks": 2}),
        msgspec.json.encode(NUMBERS | {"start_rank": -(2**63)}),
        msgspec.json.encode(NUMBERS | {"num_ranks": 10**9}),
        msgspec.json.encode(NUMBERS).replace(b":2", b":" + b"9" * 5000),
        b'{"type":"Registration","facts":' + 20_000 * b"[" + 20_000 * b"]" + b"}",
        b'{"x":' + 30_000 * b"[" + 30_000 * b"]" + b',"type":"JoinRequest"}',
        b"\xff" * 100,
    ],
)
@pytest.mark.parametrize("token", ["secret", None])
def test_no_message_of_a_stranger_ends_the_head(tmp_path: Path, said: bytes, token: str | None) -> None:
    rendezvous = Rendezvous(tmp_path, replace(HEAD, token=token))
    try:
        with rendezvous.stranger() as stranger:
            say(stranger, JoinRequest(__version__, new_nonce()), said)
            everything(stranger)
        rendezvous.join(token=token)
        assert rendezvous.updates == []
    finally:
        rendezvous.stop()


def test_ranks_out_of_range_are_no_message() -> None:
    decoder = msgspec.json.Decoder(Registration)
    assert decoder.decode(msgspec.json.encode(NUMBERS)).ranks == range(2, 3)
    for number in (-1, 65536, 2**64):
        with pytest.raises(msgspec.ValidationError):
            decoder.decode(json.dumps(NUMBERS | {"num_ranks": number}))


def test_a_stranger_cannot_fill_the_heads_memory_or_its_log(
    rendezvous: Rendezvous, caplog: pytest.LogCaptureFixture
) -> None:
    with rendezvous.stranger() as stranger:
        stranger.sendall((64 * 1024 + 1).to_bytes(4, "little"))
        assert everything(stranger) == b""
    version = "0\nERROR: all is lost" + 30_000 * "!"
    with rendezvous.stranger() as stranger:
        say(stranger, JoinRequest(version, b"1"))
        answer = everything(stranger)
    assert len(answer) < 300
    assert b"and this launcher '0\\\\nERROR: all" in answer
    assert "\nERROR: all" not in caplog.text
    assert len(caplog.text) < 2000


@pytest.mark.parametrize("again", [JoinRequest("0.0.0", b"1"), Registration(2, 2, FACTS, b"")])
def test_a_launcher_that_is_let_go_takes_its_ranks_along(
    rendezvous: Rendezvous, joined: Head, again: JoinRequest | Registration
) -> None:
    joined.channel.send(ready(2))
    rendezvous.wait_for(usable(joined, 2))
    joined.channel.send(again)
    rendezvous.wait_for(usable(joined, 2), EngineLost(2, 0, "engine core 2 is gone with its launcher", may_return=True))
    assert isinstance(hear(joined), Refused)
    assert rendezvous.missing == [2, 3]


def test_a_launcher_that_does_not_read_is_lost(rendezvous: Rendezvous, joined: Head) -> None:
    """The head is held up for a moment, then it goes on without it."""
    joined.channel.send(ready(2))
    rendezvous.wait_for(usable(joined, 2))
    [accepted] = rendezvous.remote._launchers.values()
    connection, heads_end = (
        socket.socket(fileno=socket.dup(each.channel.fileno())) for each in (joined, accepted.connection)
    )
    with connection, heads_end:
        # Megabytes would take long to fill.
        heads_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        with ThreadPoolExecutor(1) as pool:
            flood = pool.submit(say, connection, *[MetricFiles({})] * 1_000_000)
            lost = EngineLost(2, 0, "engine core 2 is gone with its launcher", may_return=True)
            rendezvous.wait_for(usable(joined, 2), lost)
            rendezvous.join()
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            assert isinstance(flood.exception(PATIENCE_S), OSError)


def test_what_a_launcher_says_of_other_ranks_ends_its_connection(rendezvous: Rendezvous, joined: Head) -> None:
    joined.channel.send(ready(1))
    with pytest.raises(ChannelClosedError):
        hear(joined)
    assert rendezvous.updates == []
    rendezvous.join()


def test_metric_files_are_kept(rendezvous: Rendezvous, joined: Head, tmp_path: Path) -> None:
    joined.channel.send(MetricFiles({"counter_5.db": None}))
    assert isinstance(hear(joined), MetricFilesKept)
    joined.channel.send(MetricFiles({"../x_5.db": None}))
    with pytest.raises(ChannelClosedError):
        hear(joined)
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_fetched_from_all_launchers(rendezvous: Rendezvous) -> None:
    """And from one that dies meanwhile, nothing is expected any more."""
    fetched = threading.Event()
    rendezvous.run(lambda: rendezvous.remote.fetch_metrics(fetched.set))
    assert fetched.is_set(), "nobody is there to answer"
    fetched.clear()
    launchers = [rendezvous.join(rank, 1) for rank in (2, 3)]
    rendezvous.run(lambda: rendezvous.remote.fetch_metrics(fetched.set))
    questions = [hear(launcher) for launcher in launchers]
    assert questions == [MetricsWanted(2), MetricsWanted(2)]
    launchers[0].channel.send(MetricFiles({}, answers=1))
    launchers[0].channel.send(MetricFiles({}))
    assert hear(launchers[0]) == MetricFilesKept()
    assert not fetched.is_set()
    launchers[0].channel.send(MetricFiles({}, answers=2))
    assert not fetched.wait(0.1)
    launchers[1].channel.close()
    assert fetched.wait(PATIENCE_S)


def test_a_launcher_that_does_not_answer_is_not_asked_for_ever(rendezvous: Rendezvous, joined: Head) -> None:
    """It may be stopped; its connection must not fill up meanwhile."""
    num_fetched = 0

    def fetched() -> None:
        nonlocal num_fetched
        num_fetched += 1

    for _ in range(40):
        rendezvous.run(lambda: rendezvous.remote.fetch_metrics(fetched))
    assert num_fetched == 24
    asked = [hear(joined) for _ in range(16)]
    assert asked == [MetricsWanted(number) for number in range(1, 17)]
    for number in range(1, 17):
        joined.channel.send(MetricFiles({}, answers=number))
    wait_for(lambda: num_fetched == 40, PATIENCE_S, "answers")
    rendezvous.run(lambda: rendezvous.remote.fetch_metrics(fetched))
    assert hear(joined) == MetricsWanted(41)


def test_an_orderly_end_is_told(rendezvous: Rendezvous, joined: Head) -> None:
    """Who has not joined yet looks for another head."""
    with rendezvous.stranger() as stranger:
        say(stranger, JoinRequest(__version__, b"1"))
        assert b"Challenge" in stranger.recv(1000)
        rendezvous.run(rendezvous.remote.say_goodbye)
        assert isinstance(hear(joined), HeadStopped)
        rendezvous.stop()
        assert everything(stranger) == b""
    with pytest.raises(ChannelClosedError):
        hear(joined)


def test_a_head_that_is_about_to_end_is_not_there_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def end(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            say(connection, HeadStopped())

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        future: Future[Head] = pool.submit(join, replace(HEAD, start_rank=2, headless=True, rpc_port=port), FACTS)
        end(listener)
        listener.close()
        rendezvous = Rendezvous(tmp_path, replace(HEAD, rpc_port=port))
        future.result(PATIENCE_S).channel.close()
        rendezvous.stop()


STARVED = """
import os, resource, socket, sys, time
from pathlib import Path
from tests.support.rendezvous import FACTS, HEAD, say
from tokenmill_server.data_parallel.head import RemoteEngines
from tokenmill_server.data_parallel.messages import JoinRequest
from tokenmill_server.watcher import Watcher

watcher = Watcher()
remote = RemoteEngines(HEAD, FACTS, watcher, Path("."))
launcher = socket.create_connection(("127.0.0.1", int(remote.address.rpartition(":")[2])))
say(launcher, JoinRequest("0.0.0", b""))
launcher.setblocking(False)
unused = os.dup(0)
os.close(unused)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (unused, limits[1]))

def serve(seconds):
    num_wakeups, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        events = watcher.wait(max(0.0, min(remote.next_tick, end) - time.monotonic()))
        num_wakeups += len(events)
        for event in events:
            remote.handle(event)
        remote.tick()
    return num_wakeups

assert 1 <= serve(1.0) <= 11
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
heard, patience_end = b"", time.monotonic() + 60
while b"Refused" not in heard:
    assert time.monotonic() < patience_end, heard
    serve(0.1)
    try:
        heard += launcher.recv(1000)
    except BlockingIOError:
        pass
remote.close()
"""


def test_without_file_descriptors_the_head_waits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=2 * PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot accept a launcher: [Errno 24]" in done.stderr


def test_missing_ranks_are_named_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head, "_REMIND_S", 0.05)
    with caplog.at_level(logging.INFO):
        rendezvous = Rendezvous(tmp_path)
        wait_for(lambda: caplog.text.count("no launcher has ranks 2 to 3 yet") >= 2, PATIENCE_S, "reminders")
        rendezvous.join(2, 1)
        wait_for(
            lambda: "no launcher has rank 3 yet: start it with --headless" in caplog.text, PATIENCE_S, "a reminder"
        )
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
        wait_for(
            lambda: f"still waiting for the head at 127.0.0.1:{port}: Connection refused" in caplog.text,
            PATIENCE_S,
            "it",
        )
        rendezvous = Rendezvous(tmp_path, replace(HEAD, rpc_port=port))
        future.result(PATIENCE_S).channel.close()
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
