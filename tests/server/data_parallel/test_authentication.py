"""Proofs that a secret is shared, and the key that follows from it."""

import itertools

import zmq

from tokenmill_server.data_parallel.authentication import engine_key, is_proof, new_nonce, proof


def test_a_proof_holds_for_its_token_role_and_parts_alone() -> None:
    nonce = new_nonce()
    given = proof("secret", "head", nonce, b"ab")
    assert is_proof(given, "secret", "head", nonce, b"ab")
    for token, role, parts in (
        ("other", "head", (nonce, b"ab")),
        (None, "head", (nonce, b"ab")),
        ("secret", "launcher", (nonce, b"ab")),
        ("secret", "head", (new_nonce(), b"ab")),
        ("secret", "head", (nonce, b"a", b"b")),
        ("secret", "head", (nonce + b"a", b"b")),
    ):
        assert not is_proof(given, token, role, *parts)
    assert not is_proof(b"", "secret", "head", nonce, b"ab")


def test_without_a_token_both_sides_agree_as_well() -> None:
    nonce = new_nonce()
    assert is_proof(proof(None, "head", nonce), None, "head", nonce)


def test_keys_are_valid_and_differ_by_token_and_deployment() -> None:
    first, second = new_nonce(), new_nonce()
    keys = [engine_key(token, nonce) for token, nonce in itertools.product(("a", "b", None), (first, second))]
    assert len(set(keys)) == 6
    assert all(len(zmq.curve_public(key.encode())) == 40 for key in keys)
    assert engine_key("a", first) == keys[0]
