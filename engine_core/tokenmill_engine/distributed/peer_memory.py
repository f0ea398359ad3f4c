"""Memory of each member of a group that all of them map: of GPUs of one host through CUDA's handles between processes,
on CPUs through files without a name."""

from collections.abc import Callable

Exchange = Callable[[bytes], list[bytes]]
"""Gathers bytes of all members of a group, as many from each, by rank."""


class PeerMemoryError(Exception):
    """Members cannot map each other's memory. The message is one line."""
