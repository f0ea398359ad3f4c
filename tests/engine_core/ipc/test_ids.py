"""Request ids and identities."""

import numpy as np
import pytest

from tokenmill_engine.ipc.ids import (
    CLIENT_SHIFT,
    MAX_CLIENTS,
    RequestIds,
    client_identity,
    client_of,
    incarnation_of,
    is_incarnation,
    make_request_id,
)


def test_ids_of_servers_and_their_incarnations_never_meet() -> None:
    ids = [RequestIds(client, incarnation) for client in range(3) for incarnation in range(3)]
    drawn = [source.next() for source in ids for _ in range(100)]
    assert len(set(drawn)) == len(drawn)


def test_the_owner_can_be_read_from_the_id_alone_and_in_arrays() -> None:
    for client in (0, 1, 255, 256, MAX_CLIENTS - 1):
        request_id = make_request_id(client, 255, (1 << 40) - 1)
        assert client_of(request_id) == client
        assert incarnation_of(request_id) == 255
        assert incarnation_of(make_request_id(client, 7, 3)) == 7
        assert 0 <= request_id < 1 << 63
        assert (np.array([request_id], dtype=np.int64) >> CLIENT_SHIFT).tolist() == [client]


def test_counters_wrap_within_their_field() -> None:
    assert make_request_id(2, 256, 1 << 40) == make_request_id(2, 0, 0)


def test_an_incarnation_is_known_by_its_ids_whatever_its_number() -> None:
    for incarnation in (0, 5, 255, 300):
        request_id = make_request_id(2, incarnation, 9)
        assert is_incarnation(request_id, incarnation)
        assert not is_incarnation(request_id, incarnation + 1)


def test_there_are_only_so_many_clients() -> None:
    with pytest.raises(ValueError, match="client"):
        make_request_id(MAX_CLIENTS, 0, 0)


def test_identities_are_distinct_and_do_not_begin_with_the_reserved_zero() -> None:
    identities = [client_identity(client) for client in range(600)]
    assert len(set(identities)) == 600
    assert all(identity[0] != 0 for identity in identities)
