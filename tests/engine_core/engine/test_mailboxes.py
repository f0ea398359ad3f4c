"""The queues between the sockets' threads and the engine's loop."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from tests.support.server import wait_for
from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.ipc.ids import client_identity, make_request_id
from tokenmill_engine.ipc.sockets import connect_dealer
from tokenmill_engine.mailboxes import Inbox, Outbox
from tokenmill_engine.messages import (
    BlockEvents,
    ClientMessage,
    EngineLoad,
    EngineMessage,
    Hello,
    LoadReport,
    StepOutput,
)
from tokenmill_engine.reports import Output


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def inbox(context: "zmq.Context[zmq.Socket[bytes]]") -> Inbox:
    return Inbox(context, "inproc://in")


def flood(inbox: Inbox) -> tuple[list[ClientMessage], Callable[[ClientMessage], None]]:
    """A hundred messages. Returns what was handled, in order, and what handles one in a millisecond."""
    for number in range(100):
        inbox.put(Hello(number))
    seen: list[ClientMessage] = []

    def handle(message: ClientMessage) -> None:
        seen.append(message)
        time.sleep(0.001)

    return seen, handle


class TestInbox:
    def test_a_flood_does_not_keep_the_next_step_waiting(self, inbox: Inbox) -> None:
        seen, handle = flood(inbox)
        turns = []
        while len(seen) < 100:
            before = len(seen)
            assert inbox.drain(handle, wait=False, timeout_s=None)
            turns.append(len(seen) - before)
        assert 1 <= max(turns) <= 6
        assert seen == [Hello(number) for number in range(100)]

    def test_where_steps_are_long_more_is_taken_in_between_them(self, inbox: Inbox) -> None:
        """Hundreds of texts are soon counted, and others may go before them."""
        seen, handle = flood(inbox)
        assert inbox.drain(handle, wait=False, timeout_s=None)
        assert len(seen) < 20
        time.sleep(0.4)
        before = len(seen)
        assert inbox.drain(handle, wait=False, timeout_s=None)
        assert len(seen) - before > 20

    def test_it_waits_no_longer_than_allowed(self, inbox: Inbox) -> None:
        seen: list[ClientMessage] = []
        assert inbox.drain(seen.append, wait=False, timeout_s=None)
        assert inbox.drain(seen.append, wait=True, timeout_s=0.001)
        assert seen == []

    def test_a_failure_overtakes_what_is_queued_and_wakes_who_waits(self, inbox: Inbox) -> None:
        failing = threading.Thread(target=lambda: (time.sleep(0.05), inbox.fail(EngineDeadError("a worker ended"))))
        failing.start()
        with pytest.raises(EngineDeadError, match="a worker ended"):
            inbox.drain(print, wait=True, timeout_s=None)
        failing.join()
        inbox.put(Hello(1))
        seen: list[ClientMessage] = []
        with pytest.raises(EngineDeadError):
            inbox.drain(seen.append, wait=False, timeout_s=None)
        assert seen == []

    def test_stop_overtakes_what_is_queued(self, inbox: Inbox) -> None:
        for number in range(5):
            inbox.put(Hello(number))
        inbox.stop()
        seen: list[ClientMessage] = []
        assert not inbox.drain(seen.append, wait=True, timeout_s=None)
        assert seen == []


def output_for(incarnation: int, counter: int = 5, token_ids: bytes = b"") -> StepOutput:
    ids = np.array([make_request_id(1, incarnation, counter)], dtype="<i8").tobytes()
    return StepOutput(0, ids, np.zeros(1, dtype="<i4").tobytes(), token_ids, EngineLoad())


def _nobody(client: int, incarnation: int) -> None:
    raise AssertionError(f"API server {client} should have got everything")


class TestOutbox:
    def test_what_nobody_takes_is_given_up_by_incarnation(
        self, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tokenmill_engine.mailboxes._KEEP_S", 0.05)
        lost: list[tuple[int, int]] = []
        outbox = Outbox(context, "inproc://out", lambda *client: lost.append(client), _nobody)
        outbox.start()
        outbox.put([(1, output_for(3)), (1, LoadReport(0, EngineLoad(), 3)), (1, output_for(4))])
        wait_for(lambda: len(lost) == 2, 30, "two lost clients")
        assert lost == [(1, 3), (1, 4)]

    def test_a_client_that_connects_in_time_gets_all_in_order(
        self, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tokenmill_engine.mailboxes._KEEP_S", 60.0)
        lost: list[int] = []
        outbox = Outbox(context, "inproc://late", lambda client, _: lost.append(client), _nobody)
        outbox.start()
        outbox.put([(1, LoadReport(number, EngineLoad())) for number in range(3)])
        time.sleep(0.02)
        socket = connect_dealer(context, "inproc://late", client_identity(1))
        received = []
        for _ in range(3):
            assert socket.poll(30_000)
            received.append(msgspec.msgpack.decode(socket.recv(), type=LoadReport).engine)
        socket.close(linger=0)
        assert received == [0, 1, 2]
        assert lost == []

    def test_a_client_that_takes_nothing_gets_its_outputs_later_and_reports_anew(
        self, context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outputs are bounded by what it asked for; loads and blocks of an engine that serves others are not."""
        monkeypatch.setattr("tokenmill_engine.mailboxes._MAX_QUEUED", 2)
        monkeypatch.setattr("tokenmill_engine.mailboxes._KEEP_S", 60.0)
        lost: list[tuple[int, int]] = []
        missed: list[tuple[int, int]] = []
        endpoint = f"ipc://{tmp_path}/out"
        outbox = Outbox(context, endpoint, lambda *client: lost.append(client), lambda *client: missed.append(client))
        outbox.start()
        client = context.socket(zmq.DEALER)
        client.setsockopt(zmq.ROUTING_ID, client_identity(1))
        client.setsockopt(zmq.RCVHWM, 1)
        client.connect(endpoint)
        much = bytes(200_000)
        outputs: list[Output] = []
        for number in range(30):
            outputs += [(1, output_for(7, number, much)), (1, BlockEvents(0, much, b"", 7))]
        outbox.put([(1, LoadReport(0, EngineLoad(), 7))])
        assert client.poll(30_000)
        monkeypatch.setattr("tokenmill_engine.mailboxes._KEEP_S", 0.05)
        # When the client that does not exist is given up, all of it was tried.
        outbox.put([*outputs, (9, LoadReport(0, EngineLoad(), 4))])
        wait_for(lambda: lost == [(9, 4)], 30, "a lost client")
        assert missed == []
        decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)
        received: list[EngineMessage] = []
        while sum(isinstance(message, StepOutput) for message in received) < 30:
            assert client.poll(30_000)
            received.append(decoder.decode(client.recv()))
        wait_for(lambda: missed, 30, "word that it was spared reports")
        # It follows all that came before.
        outbox.put([(1, LoadReport(0, EngineLoad(), 8))])
        while received[-1] != LoadReport(0, EngineLoad(), 8):
            assert client.poll(30_000)
            received.append(decoder.decode(client.recv()))
        assert [message for message in received if isinstance(message, StepOutput)] == [
            message for _, message in outputs if isinstance(message, StepOutput)
        ]
        assert 0 < sum(isinstance(message, BlockEvents) for message in received) < 20
        assert missed == [(1, 7)]
        assert lost == [(9, 4)]
        client.close(linger=0)


FAILING_INBOX = """
import zmq
from tokenmill_engine.mailboxes import Inbox
context = zmq.Context()
Inbox(context, "inproc://in").start()
context.term()
"""
FAILING_OUTBOX = """
import time, zmq
from tokenmill_engine.mailboxes import Outbox
outbox = Outbox(zmq.Context(), "inproc://out", print, print)
outbox.start()
outbox.put([(1, object())])
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "script"), [("inbox", FAILING_INBOX), ("outbox", FAILING_OUTBOX)])
def test_the_process_ends_with_either_thread(name: str, script: str) -> None:
    """Without the one it would be deaf, without the other dumb, and requests would wait for ever."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert f"thread {name} failed" in done.stderr
