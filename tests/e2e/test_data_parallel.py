"""Data-parallel ranks of several launchers: a head and headless ones, hybrid and external balancing."""

import contextlib
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.exposition import samples
from tests.support.ports import free_port
from tests.support.processes import wait_for_ends
from tests.support.server import PATIENCE_S, Server, check_error, run_serve, start_server, wait_for
from tests.support.streams import BackgroundStream, at_once, raw_request
from tests.support.tcp_proxy import TcpProxy
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.sockets import public_key
from tokenmill_engine.messages import EngineReady
from tokenmill_server.data_parallel.authentication import engine_key
from tokenmill_server.data_parallel.messages import Accepted, FromHead, FromLauncher

pytestmark = pytest.mark.slow

TOKEN = {"TOKENMILL_DP_TOKEN": "only for tests"}
_START_S = 3 * PATIENCE_S


class Deployment:
    """Launchers that share a rendezvous, each with its flags."""

    def __init__(self, model: Path, *common: str, env: dict[str, str] | None = None, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self._common = (str(model), *TINY_FLAGS, "--data-parallel-rpc-port", str(self.port), *common)
        self._env = TOKEN if env is None else env

    @contextlib.contextmanager
    def head(self, *flags: str, port: int = 0) -> Iterator[Server]:
        """Not ready before its headless launchers are."""
        with start_server(*self._common, *flags, env=self._env, wait=False, port=port) as server:
            yield server

    @contextlib.contextmanager
    def headless(self, *flags: str) -> Iterator[Server]:
        with start_server(*self._common, "--headless", *flags, env=self._env, wait=False) as launcher:
            yield launcher

    def refused(self, *flags: str, env: dict[str, str] | None = None) -> str:
        """The last line of a launcher that cannot start."""
        done = run_serve(*self._common, "--port", "0", *flags, env=self._env if env is None else env)
        assert done.returncode == 1
        return done.stderr.splitlines()[-1]


def wait_for_ranks(launcher: Server) -> None:
    wait_for(lambda: "ready: rank" in launcher.log or launcher.process.poll() is not None, _START_S, "engine cores")
    assert launcher.process.poll() is None, launcher.log


def ask(server: Server, rank: int) -> httpx.Response:
    """The same question to this rank, always."""
    body = {"prompt": "The mill", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)})


def pinned(server: Server, rank: int) -> str:
    response = ask(server, rank)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def wait_for_return(server: Server, rank: int) -> None:
    """Until the rank has answered once."""
    wait_for(lambda: ask(server, rank).status_code == 200, 2 * PATIENCE_S, f"rank {rank}", poll_s=0.2)


def endless(server: Server, rank: int) -> BackgroundStream:
    """A stream of this rank that only a fault ends."""
    fields = {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True}
    return BackgroundStream(server.url, "/v1/completions", headers={"X-data-parallel-rank": str(rank)}, **fields)


def wait_for_running(server: Server, count: int, **labels: str) -> None:
    wait_for(lambda: server.metric("num_requests_running", **labels) == count, PATIENCE_S, f"{count} running requests")


def health(server: Server) -> int | None:
    try:
        return server.http.get("/health").status_code
    except httpx.TransportError:
        return None


def waits_for(port: int) -> str | None:
    """What a head at this port says of its start; None: it does not answer."""
    try:
        response = httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=PATIENCE_S)
    except httpx.TransportError:
        return None
    health = response.json()
    assert (response.status_code, health["status"]) == (503, "starting")
    return str(health["reason"])


def finished(server: Server, rank: int) -> float:
    """Requests that have ended there. A launcher that is slow to tell its counts is shown as it was heard last."""
    return server.metric("request_success_total", engine=str(rank))


def wait_for_finished(server: Server, rank: int, count: float) -> None:
    wait_for(lambda: finished(server, rank) == count, PATIENCE_S, f"{count} requests that rank {rank} has finished")


def test_a_head_names_the_ranks_that_are_still_missing(tiny_model: Path) -> None:
    """To who asks for its health, whoever comes, goes or is replaced meanwhile."""
    deployment, port = Deployment(tiny_model, "-dp", "3"), free_port()
    with deployment.head("-dpl", "0", "-asc", "1", port=port) as head:
        wait_for(lambda: waits_for(port) == "no launcher has ranks 0 to 2 yet", PATIENCE_S, "all ranks")
        with deployment.headless("-dpl", "1", "-dpr", "1"):
            wait_for(lambda: waits_for(port) == "no launcher has ranks 0 and 2 yet", PATIENCE_S, "the others")
            (killed,) = head.api_server_pids()
            head.kill(killed)
            wait_for(lambda: head.api_server_pids() not in ([], [killed]), PATIENCE_S, "another API server")
            wait_for(lambda: waits_for(port) == "no launcher has ranks 0 and 2 yet", PATIENCE_S, "the others")
        wait_for(lambda: waits_for(port) == "no launcher has ranks 0 to 2 yet", PATIENCE_S, "all ranks")


@dataclass(frozen=True)
class Pair:
    """A head with rank 0 and two API servers, and a headless launcher with ranks 1 and 2."""

    deployment: Deployment
    head: Server
    launcher: Server


@pytest.fixture(scope="module")
def pair(tiny_model: Path) -> Iterator[Pair]:
    deployment = Deployment(tiny_model, "-dp", "3")
    with deployment.head("-dpl", "1", "-asc", "2") as head, deployment.headless("-dpl", "2", "-dpr", "1") as launcher:
        wait_for_ranks(launcher)
        head.wait_until_ready()
        yield Pair(deployment, head, launcher)


def test_requests_reach_all_ranks(pair: Pair, tiny_server: Server) -> None:
    """With the answers of one engine core, whichever rank gives them; no series is there twice."""
    head = pair.head
    assert (len(head.engine_pids()), len(pair.launcher.engine_pids())) == (1, 2)
    assert (len(head.api_server_pids()), pair.launcher.api_server_pids()) == (2, [])
    before = [finished(head, rank) for rank in range(3)]
    fields = [
        {"prompt": f"{number} mills ground", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        for number in range(24)
    ]
    answers = at_once([lambda f=f: head.text(**f) for f in fields])  # type: ignore[misc]
    assert answers == [tiny_server.text(**f) for f in fields]
    assert len({pinned(head, rank) for rank in range(3)}) == 1
    total = sum(before) + 27
    wait_for(lambda: sum(finished(head, rank) for rank in range(3)) == total, PATIENCE_S, "counts of all requests")
    assert all(finished(head, rank) >= before[rank] + 2 for rank in range(3))
    samples(head.http.get("/metrics").text)


def test_a_rank_that_is_not_there_is_refused(pair: Pair) -> None:
    response = pair.head.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-data-parallel-rank": "3"})
    assert "ranks 0 to 2" in check_error(response, 400)["message"]


def test_a_client_that_leaves_frees_a_remote_rank(pair: Pair) -> None:
    head = pair.head
    clients = [
        raw_request(head.url, "/v1/completions", {"prompt": "Once", "max_tokens": 50000, "ignore_eos": True})
        for _ in range(6)
    ]
    wait_for_running(head, 6)
    assert head.metric("num_requests_running", engine="0") < 6
    for client in clients:
        client.close()
    head.check_idle()


def test_a_killed_api_server_frees_remote_ranks(pair: Pair) -> None:
    head = pair.head
    streams = [endless(head, rank) for rank in (1, 2) for _ in range(2)]
    wait_for_running(head, 4)
    for pid in head.api_server_pids():
        head.kill(pid)
    for stream in streams:
        result = stream.result()
        assert result.broken or result.error is not None
    head.drop_connections()
    wait_for(lambda: len(head.api_server_pids()) == 2, PATIENCE_S, "API servers")
    wait_for(lambda: health(head) == 200, PATIENCE_S, "a healthy head")
    head.check_idle()
    for rank in range(3):
        wait_for_return(head, rank)
    assert len({pinned(head, rank) for rank in range(3)}) == 1


def test_a_killed_engine_core_is_restarted_by_its_launcher(pair: Pair) -> None:
    head, launcher = pair.head, pair.launcher
    count = finished(head, 1)
    pinned(head, 1)
    wait_for_finished(head, 1, count + 1)
    lost, kept = endless(head, 1), endless(head, 2)
    wait_for_running(head, 2)
    lost.wait_for_events()
    launcher.kill(launcher.engine_pids()[0])
    error = lost.result().error
    assert error is not None
    assert "engine core 1" in error["message"]
    wait_for(lambda: "engine core 1 serves again" in head.log, _START_S, "the restarted engine core")
    wait_for_return(head, 1)
    wait_for_finished(head, 1, count + 3)
    assert head.metric("request_success_total", engine="1", finished_reason="error") == 1
    wait_for_running(head, 1)
    assert kept.is_alive()


def test_launchers_that_do_not_fit_are_refused_before_weights_load(pair: Pair) -> None:
    """Also while everything else serves, which goes on. The first one is patient, since a rank may become free."""
    refused = pair.deployment.refused
    headless = ("--headless", "-dpl", "1", "-dpr", "2")
    reasons = at_once(
        [
            lambda: refused(*headless),
            lambda: refused(*headless, env={"TOKENMILL_DP_TOKEN": "guess"}),
            lambda: refused(*headless, "--block-size", "32"),
            lambda: refused("--headless", "-dpl", "1", "-dpr", "0"),
            lambda: refused("-dpl", "1"),
        ]
    )
    assert "has joined already; no rank is free" in reasons[0]
    assert "another --data-parallel-token" in reasons[1]
    assert "give both the same" in reasons[2]
    assert "the head itself runs rank 0" in reasons[3]
    assert "is already in use" in reasons[4]
    assert len({pinned(pair.head, rank) for rank in range(3)}) == 1


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a short name, because there are sockets among them."""
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        yield Path(folder)


def test_launchers_come_late_go_and_come_back(tiny_model: Path, temporary: Path) -> None:
    """The head waits for them at first; later it serves without them: their requests fail, others go on. When the head
    dies they end. Nothing is left of any of them."""
    deployment = Deployment(tiny_model, "-dp", "2", env={"TMPDIR": str(temporary)})
    port = free_port()
    with deployment.head("-dpl", "1", port=port) as head:
        wait_for(lambda: waits_for(port) == "no launcher has rank 1 yet", PATIENCE_S, "a head that waits")
        with deployment.headless("-dpl", "1", "-dpr", "1") as launcher:
            head.wait_until_ready()
            processes = launcher.descendants()
            lost, kept = endless(head, 1), endless(head, 0)
            wait_for_running(head, 2)
            lost.wait_for_events()
            launcher.kill(launcher.process.pid)
            error = lost.result().error
            assert error is not None
            assert "engine core 1" in error["message"]
            wait_for_ends(processes)
        assert head.metric("request_success_total", engine="1", finished_reason="error") == 1
        wait_for(lambda: ask(head, 1).status_code == 503, PATIENCE_S, "a rank that is gone")
        assert health(head) == 200
        assert pinned(head, 0)
        assert kept.is_alive()
        with deployment.headless("-dpl", "1", "-dpr", "1") as launcher:
            wait_for_return(head, 1)
            assert pinned(head, 1) == pinned(head, 0)
            assert kept.is_alive()
            processes = [*launcher.descendants(), *head.descendants()]
            head.kill(head.process.pid)
            assert launcher.process.wait(PATIENCE_S) == 1
            assert "is gone, and its launchers end with it" in launcher.log.splitlines()[-1]
            wait_for_ends(processes)
    assert list(temporary.iterdir()) == []


def said(record: bytearray, message_type: Any) -> list[Any]:
    """The messages in what somebody sent over a control channel."""
    ours, theirs = socket.socketpair()
    channel: ControlChannel[Any] = ControlChannel(theirs, message_type)
    messages: list[Any] = []
    sender = threading.Thread(target=lambda: (ours.sendall(record), ours.close()))
    sender.start()
    with contextlib.suppress(ChannelClosedError):
        while True:
            messages.append(channel.receive())
    sender.join()
    channel.close()
    return messages


def test_no_key_travels_between_launchers(tiny_model: Path) -> None:
    """Though API servers use it; and when engine cores are given up, the head waits for another launcher."""
    deployment = Deployment(tiny_model, "-dp", "1")
    wire = TcpProxy(deployment.port)
    tapped = Deployment(tiny_model, "-dp", "1", port=wire.port)
    with deployment.head("-dpl", "0") as head:
        wait_for(lambda: "waiting at" in head.log, _START_S, "the head")
        with tapped.headless("-dpl", "1", "--max-engine-restarts", "0") as launcher:
            head.wait_until_ready()
            assert pinned(head, 0)
            lost = endless(head, 0)
            wait_for_running(head, 1)
            lost.wait_for_events()
            launcher.kill(launcher.engine_pids()[0])
            assert lost.result().error is not None
            assert launcher.process.wait(PATIENCE_S) == 1
        wire.stop()
        (accepted,) = [message for message in said(wire.said[1], FromHead) if isinstance(message, Accepted)]
        (ready,) = [message for message in said(wire.said[0], FromLauncher) if isinstance(message, EngineReady)]
        secret = engine_key(TOKEN["TOKENMILL_DP_TOKEN"], accepted.key_nonce)
        assert ready.endpoints.key == ""
        for record in wire.said:
            assert secret.encode() not in record
            assert public_key(secret).encode() not in record
            assert TOKEN["TOKENMILL_DP_TOKEN"].encode() not in record
        assert head.process.poll() is None
        assert health(head) == 503
        with deployment.headless("-dpl", "1"):
            wait_for_return(head, 0)
            assert head.stop() == 0


def test_orderly_ends(tiny_model: Path) -> None:
    """Of a headless launcher, whose ranks are missed; and of a head, which has no engine cores of its own here."""
    deployment = Deployment(tiny_model, "-dp", "2")
    with (
        deployment.headless("-dpl", "1", "-dpr", "1") as second,
        deployment.headless("-dpl", "1") as first,
        deployment.head("-dpl", "0") as head,
    ):
        head.wait_until_ready()
        assert head.engine_pids() == []
        assert pinned(head, 0) == pinned(head, 1)
        processes = [*first.descendants(), *second.descendants(), *head.descendants()]
        assert second.stop() == 0
        wait_for(lambda: "is gone: it was told to stop" in head.log, PATIENCE_S, "its leave")
        assert pinned(head, 0)
        assert finished(head, 1) == 1
        assert head.stop(signal.SIGINT) == 0
        assert first.process.wait(PATIENCE_S) == 0
        wait_for_ends(processes)


@pytest.mark.parametrize(
    ("flags", "ranks"), [(("-dp", "4", "-dpl", "2", "-dpr", "2"), (2, 3)), (("-dp", "4", "-dpn", "1"), (1,))]
)
def test_launchers_that_need_no_others(tiny_model: Path, flags: tuple[str, ...], ranks: tuple[int, ...]) -> None:
    """Hybrid and external balancing: ranks have their numbers in labels, titles and the header."""
    with start_server(str(tiny_model), *TINY_FLAGS, *flags) as server:
        answers = {pinned(server, rank) for rank in ranks}
        assert len(answers) == 1
        assert [finished(server, rank) for rank in ranks] == [1] * len(ranks)
        assert {
            name.partition('engine="')[2].partition('"')[0]
            for name in samples(server.http.get("/metrics").text)
            if "engine=" in name
        } == {str(rank) for rank in ranks}
        titles = " ".join(" ".join(process.cmdline()) for process in server.descendants())
        assert all(f"engine core {rank}" in titles for rank in ranks)
        response = server.http.post("/v1/completions", json={"prompt": "a"}, headers={"X-data-parallel-rank": "0"})
        assert "has no data-parallel rank 0" in check_error(response, 400)["message"]
