"""Client messages as frames of ZeroMQ's: what msgpack makes of them, and behind that a frame for each large tensor.

msgpack would copy the pixels of an image into the message and out of it again, a large one's in tens of milliseconds
for which nothing else of the process runs. In a frame of its own a tensor is sent from where it is, and stays where it
was received.
"""

import msgspec
import zmq

from tokenmill_engine.messages import AddRequest, ClientMessage, MediaItem

OWN_FRAME_BYTES = 4096
"""Tensors from this size on have a frame of their own."""

Frame = bytes | memoryview

_NUM_COPIED = 2
"""The frame with the sender's identity and the one that msgpack made are small."""


class MessageEncoder:
    """Not for several threads at once."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: ClientMessage) -> list[Frame]:
        """Frames to send together. Those of tensors are their own bytes, which must not change any more."""
        frames: list[Frame] = [b""]
        if isinstance(message, AddRequest) and message.media:
            media = tuple(_without_bytes(item, frames) for item in message.media)
            message = msgspec.structs.replace(message, media=media)
        frames[0] = self._encoder.encode(message)
        return frames


class MessageDecoder:
    """The other end."""

    def __init__(self) -> None:
        self._decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)

    def decode(self, frames: list[Frame]) -> ClientMessage:
        """What `MessageEncoder` was given. Tensors with frames of their own are views of these.

        Raises `msgspec.MsgspecError` for anything else.
        """
        if not frames:
            raise msgspec.ValidationError("a message has no frames")
        message = self._decoder.decode(frames[0])
        if isinstance(message, AddRequest) and message.media:
            media = tuple(_with_bytes(item, frames) for item in message.media)
            message = msgspec.structs.replace(message, media=media)
        return message


def send_frames(socket: "zmq.Socket[bytes]", frames: list[Frame]) -> None:
    """Raises `zmq.Again` rather than wait; then none was sent."""
    if len(frames) == 1:
        socket.send(frames[0], zmq.NOBLOCK)
    else:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)


def receive_frames(socket: "zmq.Socket[bytes]") -> list[Frame]:
    """Waits for all frames of the next message. Large ones are where ZeroMQ has put them, in memory that is theirs."""
    frames: list[Frame] = [socket.recv()]
    while socket.getsockopt(zmq.RCVMORE):
        if len(frames) < _NUM_COPIED:
            frames.append(socket.recv())
        else:
            frames.append(socket.recv(copy=False).buffer.toreadonly())
    return frames


def _without_bytes(item: MediaItem, frames: list[Frame]) -> MediaItem:
    """The item with the bytes of its large tensors in `frames`, to which they are added."""
    tensors = {}
    for name, tensor in item.tensors.items():
        if len(tensor.data) >= OWN_FRAME_BYTES:
            tensors[name] = msgspec.structs.replace(tensor, data=b"", frame=len(frames))
            frames.append(tensor.data)
        else:
            tensors[name] = tensor
    return msgspec.structs.replace(item, tensors=tensors)


def _with_bytes(item: MediaItem, frames: list[Frame]) -> MediaItem:
    tensors = {}
    for name, tensor in item.tensors.items():
        if tensor.frame and not 0 < tensor.frame < len(frames):
            raise msgspec.ValidationError(f"a tensor is in frame {tensor.frame} of {len(frames)}")
        tensors[name] = msgspec.structs.replace(tensor, data=frames[tensor.frame], frame=0) if tensor.frame else tensor
    return msgspec.structs.replace(item, tensors=tensors)
