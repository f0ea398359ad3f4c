"""The queues between the sockets' threads and the engine's loop."""

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq

from tokenmill_engine.ipc.ids import client_identity, make_request_id
from tokenmill_engine.ipc.sockets import connect_dealer
from tokenmill_engine.messages import ClientMessage, EngineLoad, Hello, LoadReport, StepOutput
from tokenmill_engine.process import Inbox, Outbox


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def inbox(context: "zmq.Context[zmq.Socket[bytes]]") -> Inbox:
    return Inbox(context, "inproc://in")


class TestInbox:
    def test_a_flood_does_not_keep_the_next_step_waiting(self, inbox: Inbox) -> None:
        for number in range(100):
            inbox.put(Hello(number))
        seen: list[ClientMessage] = []

        def handle(message: ClientMessage) -> None:
            seen.append(message)
            time.sleep(0.001)

        turns = []
        while len(seen) < 100:
            before = len(seen)
            assert inbox.drain(handle, wait=False, timeout_s=None)
            turns.append(len(seen) - before)
        assert 1 <= max(turns) <= 6
        assert seen == [Hello(number) for number in range(100)]

    def test_it_waits_no_longer_than_allowed(self, inbox: Inbox) -> None:
        seen: list[ClientMessage] = []
        assert inbox.drain(seen.append, wait=False, timeout_s=None)
        assert inbox.drain(seen.append, wait=True, timeout_s=0.001)
        assert seen == []

    def test_stop_overtakes_what_is_queued(self, inbox: Inbox) -> None:
        for number in range(5):
            inbox.put(Hello(number))
        inbox.stop()
        seen: list[ClientMessage] = []
        assert not inbox.drain(seen.append, wait=True, timeout_s=None)
        assert seen == []


def output_for(incarnation: int) -> StepOutput:
    ids = np.array([make_request_id(1, incarnation, 5)], dtype="<i8").tobytes()
    return StepOutput(0, ids, np.zeros(1, dtype="<i4").tobytes(), b"", EngineLoad())


class TestOutbox:
    def test_what_nobody_takes_is_given_up_by_incarnation(
        self, context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tokenmill_engine.process._KEEP_S", 0.05)
        lost: list[tuple[int, int]] = []
        outbox = Outbox(context, "inproc://out", lambda client, incarnation: lost.append((client, incarnation)))
        outbox.start()
        outbox.put([(1, output_for(3)), (1, LoadReport(0, EngineLoad(), 3)), (1, output_for(4))])
        deadline = time.monotonic() + 5
        while len(lost) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert lost == [(1, 3), (1, 4)]

    def test_a_client_that_connects_in_time_gets_all_in_order(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        lost: list[int] = []
        outbox = Outbox(context, "inproc://late", lambda client, _: lost.append(client))
        outbox.start()
        outbox.put([(1, LoadReport(number, EngineLoad())) for number in range(3)])
        time.sleep(0.02)
        socket = connect_dealer(context, "inproc://late", client_identity(1))
        received = []
        for _ in range(3):
            assert socket.poll(2000)
            received.append(msgspec.msgpack.decode(socket.recv(), type=LoadReport).engine)
        socket.close(linger=0)
        assert received == [0, 1, 2]
        assert lost == []
