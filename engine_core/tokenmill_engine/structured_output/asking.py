"""What an engine core and its grammar compiler say to each other. Knows no library of grammars.

The compiler is given one end of a socket for each grammar. The question is what is read from it up to its end, and so
is the answer; no answer means that whoever worked on it has ended before.
"""

import pickle
import socket
from dataclasses import dataclass
from typing import Literal

from tokenmill_engine.messages import StructuredSpec

BackendName = Literal["xgrammar", "guidance"]
BACKENDS: tuple[BackendName, ...] = ("guidance", "xgrammar")
"""A byte says which one is to be ready, by its place here; with it comes the socket."""
BEGUN = b"!"
"""In front of an answer, as soon as somebody works on it."""
MAX_ANSWER_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Question:
    """Compile this."""

    backend: BackendName
    spec: StructuredSpec
    limit_s: float
    """Seconds of a processor's time that it may take."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it."""

    compiled: str | None
    """For `load` of the same backend; None: `error` says why there is nothing."""
    error: str = ""
    is_for_another: bool = False
    """It is nothing for this library, as `NotExpressibleError` says."""


def send(sock: socket.socket, message: Question | Answer) -> None:
    """All that this end has to say. Raises OSError if the other end is gone."""
    sock.sendall(pickle.dumps(message, 5))
    sock.shutdown(socket.SHUT_WR)


def receive(sock: socket.socket) -> bytes:
    """What the other end has to say, for `pickle.loads`; nothing if it has ended before it could. Both ends are one
    program's. Raises OSError if the socket's timeout passes or the answer is longer than any may be."""
    parts = bytearray()
    while chunk := sock.recv(_CHUNK_BYTES):
        parts += chunk
        if len(parts) > MAX_ANSWER_BYTES:
            raise OSError("the answer is too long")
    return bytes(parts)
