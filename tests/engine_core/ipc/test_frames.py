"""Client messages with large tensors, over real sockets."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import zmq

from tests.support.media_items import IMAGE_TOKEN, make_pixels, with_values
from tokenmill_engine.ipc.frames import (
    OWN_FRAME_BYTES,
    Frame,
    MessageDecoder,
    MessageEncoder,
    receive_frames,
    send_frames,
)
from tokenmill_engine.ipc.sockets import bind_router, bound_endpoint, connect_dealer
from tokenmill_engine.messages import AbortRequests, AddRequest, ClientMessage, MediaItem, SamplingParams

Socket = zmq.Socket[bytes]


def request(*sizes: int) -> AddRequest:
    """With an image for each of `sizes`, in bytes; 0: one whose tensors the engine has."""
    media = tuple(
        MediaItem(
            "image", bytes([index] * 32), index, 1, None, with_values(make_pixels((size,), index)) if size else {}
        )
        for index, size in enumerate(sizes)
    )
    token_ids = np.full(len(sizes), IMAGE_TOKEN, "<i4").tobytes()
    return AddRequest(7, "label", token_ids, SamplingParams(), 0.0, media=media)


@pytest.fixture(params=["ipc", "tcp"])
def sockets(request: pytest.FixtureRequest, tmp_path: object) -> Iterator[tuple[Socket, Socket]]:
    context: zmq.Context[Socket] = zmq.Context()
    router = bind_router(context, f"ipc://{tmp_path}/in" if request.param == "ipc" else "tcp://127.0.0.1:*")
    dealer = connect_dealer(context, bound_endpoint(router), b"one")
    yield dealer, router
    context.destroy(linger=0)


def over(sockets: tuple[Socket, Socket], message: ClientMessage) -> tuple[list[Frame], ClientMessage]:
    """Frames as they were received, and what they say."""
    dealer, router = sockets
    send_frames(dealer, MessageEncoder().encode(message))
    assert router.poll(60_000)
    identity, *frames = receive_frames(router)
    assert identity == b"one"
    return frames, MessageDecoder().decode(frames)


@pytest.mark.parametrize(
    "sizes",
    [(), (1,), (0,), (OWN_FRAME_BYTES - 1,), (OWN_FRAME_BYTES,), (9_000_001,), (5000, 3, 0, 100_000, 70_000)],
)
def test_messages_come_as_they_were_sent(sockets: tuple[Socket, Socket], sizes: tuple[int, ...]) -> None:
    sent = request(*sizes)
    frames, received = over(sockets, sent)
    assert received == sent
    assert len(frames) == 1 + sum(size >= OWN_FRAME_BYTES for size in sizes)


def test_others_follow_in_order(sockets: tuple[Socket, Socket]) -> None:
    sent: list[ClientMessage] = [request(50_000), AbortRequests([7]), request(), request(8, 200_000)]
    assert [over(sockets, each)[1] for each in sent] == sent


def test_large_tensors_are_where_they_were_received(sockets: tuple[Socket, Socket]) -> None:
    frames, received = over(sockets, request(100_000))
    assert isinstance(received, AddRequest)
    data = received.media[0].tensors["pixel_values"].data
    address = np.frombuffer(data, np.uint8).ctypes.data
    assert address == np.frombuffer(frames[1], np.uint8).ctypes.data
    assert memoryview(data).readonly
    assert hash(data) == hash(bytes(data))


def test_a_tensor_may_be_a_view_of_an_array(sockets: tuple[Socket, Socket]) -> None:
    """What is sent is the array's own memory, in the state of when it was received."""
    array = np.arange(40_000, dtype=np.uint8)
    tensor = make_pixels((40_000,))
    view = msgspec.structs.replace(tensor, data=array.data.toreadonly())
    item = MediaItem("image", bytes(32), 0, 1, None, with_values(view))
    sent = msgspec.structs.replace(request(1), media=(item,))
    frames = MessageEncoder().encode(sent)
    assert np.frombuffer(frames[1], np.uint8).ctypes.data == array.ctypes.data
    _, received = over(sockets, sent)
    assert isinstance(received, AddRequest)
    assert bytes(received.media[0].tensors["pixel_values"].data) == array.tobytes()


@pytest.mark.parametrize("frame", [-1, 1, 5])
def test_a_tensor_in_a_frame_that_is_not_there_is_no_message(frame: int) -> None:
    tensors = {
        name: msgspec.structs.replace(each, frame=frame) for name, each in with_values(make_pixels((4,))).items()
    }
    item = msgspec.structs.replace(request(1).media[0], tensors=tensors)
    data = msgspec.msgpack.encode(msgspec.structs.replace(request(1), media=(item,)))
    with pytest.raises(msgspec.MsgspecError, match=f"frame {frame} of 1"):
        MessageDecoder().decode([data])


@pytest.mark.parametrize("frames", [[], [b"nothing"], [b""]])
def test_what_is_no_message(frames: list[Frame]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        MessageDecoder().decode(frames)


def test_nothing_is_sent_to_nobody() -> None:
    context: zmq.Context[Socket] = zmq.Context()
    context.setsockopt(zmq.IMMEDIATE, 1)
    dealer = connect_dealer(context, "tcp://127.0.0.1:1", b"one")
    for size in (1, 100_000):
        with pytest.raises(zmq.Again):
            send_frames(dealer, MessageEncoder().encode(request(size)))
    context.destroy(linger=0)
