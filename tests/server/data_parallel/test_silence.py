"""Launchers that fall silent while their connection stays: stopped ones, a paused container, a hung process."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import Launched, launched
from tests.support.ports import free_port
from tests.support.rendezvous import Rendezvous, hear, ready, usable
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.control import EngineLost, Ping, Pulse
from tokenmill_server import liveness
from tokenmill_server.data_parallel.joining import Head
from tokenmill_server.data_parallel.messages import Leaving, MetricFiles, Refused

GONE = EngineLost(2, 0, "engine core 2 is gone with its launcher", may_return=True)
SILENT_S = 3


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is waited for as long as in earnest."""
    monkeypatch.setattr(liveness, "INTERVAL_S", 0.05)
    monkeypatch.setattr(liveness, "SILENT_S", 1.0)


def join(rendezvous: Rendezvous) -> Head:
    joined = rendezvous.join()
    joined.channel.send(ready(2))
    rendezvous.wait_for(usable(joined, 2))
    return joined


@pytest.mark.usefixtures("soon")
def test_a_launcher_that_answers_no_ping_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is told why, in case that it wakes up; others may take its ranks."""
    rendezvous = Rendezvous(tmp_path)
    silent = join(rendezvous)
    rendezvous.wait_for(usable(silent, 2), GONE)
    assert rendezvous.missing == [2, 3]
    assert "the launcher of ranks 2 to 3 at 127.0.0.1:" in caplog.text
    assert "is gone: it did not react for 1 s" in caplog.text
    assert silent.channel.receive() == Ping()
    assert silent.channel.receive() == Refused("it did not react for 1 s")
    with pytest.raises(ChannelClosedError):
        silent.channel.receive()
    rendezvous.join()
    rendezvous.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_whatever_a_launcher_says_shows_that_it_lives(tmp_path: Path) -> None:
    """Each has a head of its own and always says the same."""
    talking: list[tuple[Rendezvous, Head, Pulse | MetricFiles | Leaving | Ping]] = []
    for said in (Pulse(), MetricFiles({}), Leaving("not yet"), Ping()):
        rendezvous = Rendezvous(tmp_path / type(said).__name__)
        talking.append((rendezvous, join(rendezvous), said))
    until = time.monotonic() + 4 * liveness.SILENT_S
    while time.monotonic() < until:
        for _, launcher, said in talking:
            launcher.channel.send(said)
            launcher.channel.receive_available()
        time.sleep(0.05)
    for rendezvous, launcher, said in talking:
        assert rendezvous.updates == [usable(launcher, 2)], said
    for rendezvous, launcher, _ in talking:
        rendezvous.wait_for(usable(launcher, 2), GONE)
        rendezvous.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("soon")
def test_a_head_that_gives_nobody_up_waits_for_ever(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path, gives_up=False)
    silent = join(rendezvous)
    time.sleep(3 * liveness.SILENT_S)
    assert rendezvous.updates == [usable(silent, 2)]
    rendezvous.stop()


def test_the_head_answers_a_launcher(tmp_path: Path) -> None:
    rendezvous = Rendezvous(tmp_path)
    joined = rendezvous.join()
    joined.channel.send(Ping())
    assert hear(joined) == Pulse()
    rendezvous.stop()


@contextlib.contextmanager
def deployment() -> Iterator[tuple[Launched, Launched]]:
    """A head with rank 0 and a headless launcher with rank 1, over scripted children."""
    environment = {"INTERVAL_S": "0.2", "SILENT_S": str(SILENT_S)}
    common = ("-dp", "2", "-dpl", "1", "--data-parallel-rpc-port", str(free_port()))
    with (
        launched(*common, environment=environment) as head,
        launched(*common, "-dpr", "1", "--headless", environment=environment) as launcher,
    ):
        head.wait_for("is ready at")
        launcher.wait_for("ready: rank 1 for the head")
        yield head, launcher


def send(number: signal.Signals, *pids: int) -> None:
    for pid in pids:
        os.kill(pid, number)


@pytest.mark.slow
def test_a_launcher_that_is_stopped_with_its_engine_core_is_noticed() -> None:
    """Its requests are answered. When it goes on it ends, and another one takes its place."""
    with deployment() as (head, launcher):
        frozen = (launcher.process.pid, launcher.pid(r"engine 1\.0"))
        send(signal.SIGSTOP, *frozen)
        head.wait_for(rf"the launcher of rank 1 at \S+ is gone: it did not react for {SILENT_S} s")
        head.wait_for(r"engine core 1 is gone with its launcher \(restarts: False\)")
        head.wait_for("its requests are lost, a launcher that brings it back may join")
        assert head.process.poll() is None
        send(signal.SIGCONT, *frozen)
        launcher.wait(1)
        last = launcher.log.splitlines()[-1]
        assert last == f"error: the head lets this launcher go: it did not react for {SILENT_S} s"
        head.process.send_signal(signal.SIGTERM)
        head.wait(0)


@pytest.mark.slow
def test_a_launcher_ends_when_its_head_is_stopped() -> None:
    with deployment() as (head, launcher):
        send(signal.SIGSTOP, head.process.pid)
        launcher.wait(1)
        last = launcher.log.splitlines()[-1]
        assert re.fullmatch(
            rf"error: the head at \S+ did not react for {SILENT_S} s, and its launchers end with it", last
        )
        send(signal.SIGCONT, head.process.pid)
        head.wait_for(r"engine core 1 is gone with its launcher \(restarts: False\)")
        head.process.send_signal(signal.SIGTERM)
        head.wait(0)


@pytest.mark.slow
def test_the_pause_of_a_whole_deployment_is_nobodys_fault() -> None:
    with deployment() as (head, launcher):
        pids = [head.process.pid, launcher.process.pid]
        pids += [head.pid(r"engine 0\.0"), head.pid(r"api 0\.0"), launcher.pid(r"engine 1\.0")]
        send(signal.SIGSTOP, *pids)
        time.sleep(SILENT_S + 1)
        send(signal.SIGCONT, *pids)
        time.sleep(SILENT_S + 1)
        assert "did not react" not in head.log + launcher.log
        head.process.send_signal(signal.SIGTERM)
        head.wait(0)
        launcher.wait(0)
