"""Names on the internal wire: 64-bit request ids and ZeroMQ identities.

A request id is (API server, incarnation of that API server, counter). A restarted API server keeps its slot and
takes the next incarnation, so ids of its dead predecessor are never met again. The client's own id is a label.
"""

import struct

_COUNTER_BITS = 40
_INCARNATION_BITS = 8
CLIENT_SHIFT = _COUNTER_BITS + _INCARNATION_BITS
"""`request_id >> CLIENT_SHIFT` is the API server, for arrays of ids too."""
MAX_CLIENTS = 1 << (63 - CLIENT_SHIFT)
"""Ids stay positive in int64."""

LAUNCHER_IDENTITY = b"launcher"


def make_request_id(client: int, incarnation: int, counter: int) -> int:
    """Pack the three parts; incarnation and counter wrap around.

    Raises:
        ValueError: `client` is not in 0..MAX_CLIENTS-1.
    """
    if not 0 <= client < MAX_CLIENTS:
        raise ValueError(f"client {client} is not in 0..{MAX_CLIENTS - 1}")
    incarnation &= (1 << _INCARNATION_BITS) - 1
    counter &= (1 << _COUNTER_BITS) - 1
    return client << CLIENT_SHIFT | incarnation << _COUNTER_BITS | counter


def client_of(request_id: int) -> int:
    """The API server that owns the request."""
    return request_id >> CLIENT_SHIFT


def incarnation_of(request_id: int) -> int:
    """The incarnation of the API server that owns the request."""
    return request_id >> _COUNTER_BITS & (1 << _INCARNATION_BITS) - 1


def is_incarnation(request_id: int, incarnation: int) -> bool:
    """Whether this incarnation of the API server, which is any number, made the id."""
    return incarnation_of(request_id) == incarnation & (1 << _INCARNATION_BITS) - 1


def is_of(request_id: int, client: int, incarnation: int) -> bool:
    """Whether this incarnation of API server `client` made the id."""
    return client_of(request_id) == client and is_incarnation(request_id, incarnation)


def client_identity(client: int) -> bytes:
    """ZeroMQ routing id of API server `client`. Never starts with a zero byte: ZeroMQ reserves those."""
    return b"c" + struct.pack("<I", client)


class RequestIds:
    """Source of fresh ids for one API server process."""

    __slots__ = ("_client", "_counter", "_incarnation")

    def __init__(self, client: int, incarnation: int = 0) -> None:
        self._client = client
        self._incarnation = incarnation
        self._counter = 0

    def next(self) -> int:
        """A request id that this process has not used before."""
        self._counter += 1
        return make_request_id(self._client, self._incarnation, self._counter)
