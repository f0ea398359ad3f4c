"""How launchers prove to each other that they share a secret, and the key that their engine cores' sockets get from it.

Neither the token nor a key, secret or public, ever travels between launchers: both sides compute keys and proofs as
HMACs over random numbers that were sent. Without a token the proofs only show that nobody has one, and whoever can read
the network can compute the key.
"""

import hashlib
import hmac
import secrets

from zmq.utils import z85

_NONCE_BYTES = 32


def new_nonce() -> bytes:
    """A random number that was never used before."""
    return secrets.token_bytes(_NONCE_BYTES)


def proof(token: str | None, role: str, *parts: bytes) -> bytes:
    """What only somebody in possession of the token can compute. `role` keeps one side's proof from being sent back as
    the other's."""
    mac = hmac.new((token or "").encode(), role.encode(), hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little") + part)
    return mac.digest()


def is_proof(given: bytes, token: str | None, role: str, *parts: bytes) -> bool:
    """Whether `given` is that proof."""
    return hmac.compare_digest(given, proof(token, role, *parts))


def engine_key(token: str | None, nonce: bytes) -> str:
    """The secret CURVE key, as Z85 text, of the sockets of all engine cores that joined under `nonce`."""
    return z85.encode(proof(token, "engine cores", nonce)).decode("ascii")
