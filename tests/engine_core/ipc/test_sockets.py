"""Sockets between API servers and engine cores."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from tokenmill_engine.ipc.ids import client_identity
from tokenmill_engine.ipc.sockets import bind_router, bound_endpoint, connect_dealer, local_endpoints, public_key

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.term()


def receive(socket: zmq.Socket[bytes]) -> list[bytes]:
    assert socket.poll(30_000)
    return socket.recv_multipart()


def test_engines_hear_who_sends_and_answer_by_identity(context: Context, tmp_path: Path) -> None:
    local = local_endpoints(str(tmp_path), 0)
    endpoints = local.input, local.output
    with ExitStack() as stack:
        inbox, outbox = (stack.enter_context(bind_router(context, endpoint)) for endpoint in endpoints)
        clients = [
            [stack.enter_context(connect_dealer(context, endpoint, client_identity(number))) for endpoint in endpoints]
            for number in range(2)
        ]
        for number, (to_engine, _) in enumerate(clients):
            to_engine.send(b"request %d" % number)
        heard = dict(receive(inbox) for _ in clients)
        assert heard == {client_identity(number): b"request %d" % number for number in range(2)}
        for number, (_, from_engine) in enumerate(clients):
            from_engine.send(b"connected")
            receive(outbox)
            outbox.send_multipart([client_identity(number), b"answer %d" % number])
            assert receive(from_engine) == [b"answer %d" % number]


def test_a_message_to_nobody_is_dropped_or_refused_as_asked(context: Context, tmp_path: Path) -> None:
    with (
        bind_router(context, f"ipc://{tmp_path}/a") as lenient,
        bind_router(context, f"ipc://{tmp_path}/b", mandatory=True) as strict,
    ):
        lenient.send_multipart([client_identity(0), b"lost"])
        with pytest.raises(zmq.ZMQError) as caught:
            strict.send_multipart([client_identity(0), b"lost"])
    assert caught.value.errno == zmq.EHOSTUNREACH


def test_who_comes_back_under_an_identity_replaces_the_old_connection(context: Context, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/a"
    context.setsockopt(zmq.RECONNECT_IVL, -1)  # the old one is gone, and does not come back in its turn
    with (
        bind_router(context, endpoint) as router,
        connect_dealer(context, endpoint, client_identity(0)) as old,
    ):
        old.send(b"old")
        receive(router)
        with connect_dealer(context, endpoint, client_identity(0)) as new:
            new.send(b"new")
            receive(router)
            router.send_multipart([client_identity(0), b"answer"])
            assert receive(new) == [b"answer"]
            assert old.poll(0) == 0


def test_a_path_that_no_socket_can_have_is_named() -> None:
    with pytest.raises(ValueError, match="TMPDIR"):
        local_endpoints("/tmp/" + "x" * 120, 0)


def test_every_incarnation_has_addresses_of_its_own() -> None:
    places = [local_endpoints("/r", engine, incarnation) for engine in range(2) for incarnation in range(2)]
    assert len({place.input for place in places} | {place.output for place in places}) == 8


def test_a_bound_socket_tells_where_it_is(context: Context, tmp_path: Path) -> None:
    file = f"ipc://{tmp_path}/a"
    with bind_router(context, file) as local, bind_router(context, "tcp://127.0.0.1:*") as remote:
        assert bound_endpoint(local) == file
        address = bound_endpoint(remote)
        assert address.startswith("tcp://127.0.0.1:")
        with connect_dealer(context, address, client_identity(0)) as dealer:
            dealer.send(b"hello")
            assert receive(remote) == [client_identity(0), b"hello"]


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://[::1]:*"])
def test_only_who_knows_the_key_gets_a_connection(context: Context, address: str) -> None:
    if "::1" in address and not _has_ipv6():
        address = "tcp://127.0.0.1:*"
    own, other = (zmq.curve_keypair()[1].decode() for _ in range(2))
    context.setsockopt(zmq.IMMEDIATE, 1)
    with ExitStack() as stack:
        router = stack.enter_context(bind_router(context, address, secret_key=own))
        endpoint = bound_endpoint(router)
        knowing, guessing, plain = (
            stack.enter_context(connect_dealer(context, endpoint, client_identity(number), key))
            for number, key in enumerate((public_key(own), public_key(other), ""))
        )
        assert knowing.poll(30_000, zmq.POLLOUT)
        knowing.send(b"hello")
        assert receive(router) == [client_identity(0), b"hello"]
        router.send_multipart([client_identity(0), b"answer"])
        assert receive(knowing) == [b"answer"]
        assert not guessing.poll(300, zmq.POLLOUT)
        assert not plain.poll(100, zmq.POLLOUT)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False
