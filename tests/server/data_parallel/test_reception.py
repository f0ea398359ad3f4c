"""Who connects to the head and is no launcher: it holds up nobody who is one."""

import contextlib
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support.rendezvous import FACTS, Rendezvous, everything, say
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_server.data_parallel import reception
from tokenmill_server.data_parallel.messages import JoinRequest, Registration
from tokenmill_server.version import __version__

LET_GO = "that did not register and were let go"


@contextlib.contextmanager
def strangers(rendezvous: Rendezvous, count: int, *said: JoinRequest) -> Iterator[list[socket.socket]]:
    """Connections over which nothing more is said."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(count):
            connection = stack.enter_context(rendezvous.stranger())
            say(connection, *said)
            connections.append(connection)
        yield connections


@pytest.mark.parametrize("said", [(), (JoinRequest(__version__, b"1"),)])
def test_launchers_join_at_once_however_many_strangers_wait(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, said: tuple[JoinRequest, ...]
) -> None:
    """Also if those ask to join and then say nothing."""
    monkeypatch.setattr(reception, "_SILENT_S", 600.0)
    monkeypatch.setattr(reception, "_HANDSHAKE_S", 600.0)
    with strangers(rendezvous, 200, *said):
        began = time.monotonic()
        for rank in (2, 3):
            rendezvous.join(rank, 1)
        assert time.monotonic() - began < PATIENCE_S
        assert rendezvous.missing == []


def test_who_is_joining_is_not_pushed_out_by_those_that_say_nothing(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_SILENT_S", 600.0)
    with strangers(rendezvous, 1, JoinRequest(__version__, b"1")) as (joining,):
        assert b"Challenge" in joining.recv(1000)
        with strangers(rendezvous, 200) as silent:
            assert silent[0].recv(1) == b""
            say(joining, Registration(2, 2, FACTS, b""))
            assert b"Refused" in everything(joining)


def test_who_says_nothing_is_let_go_sooner_than_who_is_joining(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reception, "_HANDSHAKE_S", 2 * PATIENCE_S)
    with strangers(rendezvous, 1, JoinRequest(__version__, b"1")) as (joining,):
        assert b"Challenge" in joining.recv(1000)
        monkeypatch.setattr(reception, "_SILENT_S", 0.2)
        with strangers(rendezvous, 1) as (silent,):
            assert silent.recv(1) == b""
        say(joining, Registration(2, 2, FACTS, b""))
        assert b"Refused" in everything(joining)


def test_many_strangers_are_one_warning(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reception, "_SILENT_S", 0.2)
    with strangers(rendezvous, 1) as (first,):
        assert first.recv(1) == b""
    wait_for(lambda: f"{LET_GO}: 1, the last one from 127.0.0.1:" in caplog.text, PATIENCE_S, "a warning")
    with strangers(rendezvous, 30) as more:
        for connection in more:
            assert connection.recv(1) == b""
    monkeypatch.setattr(reception, "_SILENT_S", PATIENCE_S)
    rendezvous.join()
    assert caplog.text.count(LET_GO) == 1
    assert [record.levelno for record in caplog.records if LET_GO in record.getMessage()] == [logging.WARNING]
    monkeypatch.setattr(rendezvous.remote._reception, "_warn_at", time.monotonic())
    wait_for(lambda: f"{LET_GO}: 30, the last one" in caplog.text, PATIENCE_S, "the next warning")
