"""Where blocks belong that a rank has still to compute: what all API servers agree on without talking."""

from collections.abc import Iterable

_BITS = 64
_MASK = (1 << _BITS) - 1


def home_rank(name: int, ranks: Iterable[int]) -> int:
    """The one of `ranks` where prompts that go on with block `name` belong: rendezvous hashing. If a rank leaves, only
    the names move whose home it was."""
    return max(ranks, key=lambda rank: _mix(name ^ _mix(rank + 1)))


def share_of(name: int) -> float:
    """A number from 0 to 1 that is as good as random, and the same for this name everywhere."""
    return _mix(name) / _MASK


def _mix(value: int) -> int:
    """The finalizer of the SplitMix64 generator (Steele, Lea, Flood 2014): a bijection of 64-bit integers."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
