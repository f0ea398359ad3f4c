"""The control channel: framing, both ways of receiving, and its end."""

import asyncio
import socket
import struct
import threading

import pytest

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import Drain, EngineLost, EnginesReady, ToApiServer
from tokenmill_engine.messages import Endpoints, EngineReady

ENDPOINTS = Endpoints("ipc:///i", "tcp://host:1")
READY = EnginesReady([EngineReady(0, 1, ENDPOINTS, 100, 10, 16, 160, "none", {"load": 1.5})])
Pair = tuple[ControlChannel[ToApiServer], ControlChannel[ToApiServer]]


@pytest.fixture
def pair() -> Pair:
    ours, theirs = socket.socketpair()
    return ControlChannel(ours, ToApiServer), ControlChannel(theirs, ToApiServer)


def test_messages_arrive_in_order_with_their_types(pair: Pair) -> None:
    sent = [READY, EngineLost(1, 2, "why", restarts=True), Drain(2.5)]
    for message in sent:
        pair[0].send(message)
    assert [pair[1].receive() for _ in sent] == sent
    pair[1].send(Drain(1.0))
    assert pair[0].receive() == Drain(1.0)
    for channel in pair:
        channel.close()


def test_receive_waits(pair: Pair) -> None:
    threading.Timer(0.05, pair[0].send, [Drain(1.0)]).start()
    assert pair[1].receive() == Drain(1.0)
    for channel in pair:
        channel.close()


def test_a_message_larger_than_the_sockets_buffer_passes(pair: Pair) -> None:
    message = EngineLost(0, 0, "x" * 3_000_000)
    sender = threading.Thread(target=pair[0].send, args=[message])
    sender.start()
    assert pair[1].receive() == message
    sender.join()
    for channel in pair:
        channel.close()


def test_a_side_that_does_not_read_is_given_up_in_time() -> None:
    """And nothing follows the half of a frame that it may have got."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, 100_000))
    channels: Pair = ControlChannel(ours, ToApiServer), ControlChannel(theirs, ToApiServer)
    with pytest.raises(ChannelClosedError, match="does not read"):
        channels[0].send(EngineLost(0, 0, "x" * 3_000_000))
    for channel in channels:
        with pytest.raises(ChannelClosedError):
            channel.receive()
        channel.close()


def test_the_end_of_file_is_an_error_after_the_last_message(pair: Pair) -> None:
    pair[0].send(Drain(1.0))
    pair[0].close()
    assert pair[1].receive() == Drain(1.0)
    with pytest.raises(ChannelClosedError):
        pair[1].receive()
    with pytest.raises(ChannelClosedError):
        pair[1].send(Drain(1.0))
    pair[1].close()


def test_available_messages_do_not_block(pair: Pair) -> None:
    assert pair[1].receive_available() == []
    pair[0].send(Drain(1.0))
    pair[0].send(Drain(2.0))
    assert pair[1].receive_available() == [Drain(1.0), Drain(2.0)]
    pair[0].send(Drain(3.0))
    pair[0].close()
    assert pair[1].receive_available() == [Drain(3.0)]
    with pytest.raises(ChannelClosedError):
        pair[1].receive_available()
    pair[1].close()


def test_half_a_frame_waits_for_its_other_half() -> None:
    ours, theirs = socket.socketpair()
    channel: ControlChannel[ToApiServer] = ControlChannel(theirs, ToApiServer)
    frame = b'\x20\x00\x00\x00{"type":"Drain","timeout_s":1.5} '
    ours.sendall(frame[:10])
    assert channel.receive_available() == []
    ours.sendall(frame[10:])
    assert channel.receive_available() == [Drain(1.5)]
    ours.close()
    channel.close()


def test_an_event_loop_can_watch_it(pair: Pair) -> None:
    async def receive() -> ToApiServer:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[ToApiServer] = loop.create_future()
        loop.add_reader(pair[1].fileno(), lambda: arrived.set_result(pair[1].receive_available()[0]))
        loop.call_later(0.02, pair[0].send, Drain(1.0))
        message = await asyncio.wait_for(arrived, 30)
        loop.remove_reader(pair[1].fileno())
        return message

    assert asyncio.run(receive()) == Drain(1.0)
    for channel in pair:
        channel.close()
