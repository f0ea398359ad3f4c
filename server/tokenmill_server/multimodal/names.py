"""Names by which prepared media are found again before anything is decoded: their files, and what clients call them.

A name leads to a key, never to content: what the key stands for is the cache's affair, which may have forgotten it.
"""

from collections import OrderedDict

from blake3 import blake3

NAME_BYTES = 512
"""What remembering a name takes: it, the key, and their places in a table."""
_AMBIGUOUS = b""


class AmbiguousNameError(Exception):
    """A name has stood for different contents."""


class MediaNames:
    """The latest names and the keys they stand for. Used from the event loop alone."""

    def __init__(self, capacity_bytes: int) -> None:
        self._max_names = max(1, capacity_bytes // NAME_BYTES)
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, name: bytes) -> bytes | None:
        """The key that the name stands for; None if it is not known.

        Raises AmbiguousNameError if it stood for another one before.
        """
        key = self._keys.get(name)
        if key is None:
            return None
        self._keys.move_to_end(name)
        if key == _AMBIGUOUS:
            raise AmbiguousNameError
        return key

    def remember(self, name: bytes, key: bytes) -> None:
        """From now on the name stands for `key`. One that stood for another key stands for none any more: who uses it
        without saying what it means would get somebody else's."""
        known = self._keys.get(name, key)
        self._keys[name] = key if known == key else _AMBIGUOUS
        self._keys.move_to_end(name)
        if len(self._keys) > self._max_names:
            self._keys.popitem(last=False)

    def clear(self) -> None:
        self._keys.clear()


def file_name(data: bytes | memoryview, kind: str, options: str) -> bytes:
    """Name of an encoded file that is prepared as a `kind` of media, as `options` says: everything beside its bytes
    that changes the result. Takes about a millisecond for each megabyte: call it in a thread."""
    return blake3(_head("file", kind, options)).update(data).digest()


def given_name(scope: tuple[str, ...], uuid: str, kind: str, options: str) -> bytes:
    """Name of what a client calls `uuid`. Others than those of its `scope` may call something else so."""
    return blake3(_head("uuid", kind, options, *scope, uuid)).digest()


def _head(*parts: str) -> bytes:
    """Different for all different parts: each follows its length."""
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    return b"".join(b"%d:%b;" % (len(part), part) for part in encoded)
