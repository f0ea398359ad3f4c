"""Random numbers that depend on the request alone: one uniform per (seed, output position).

No generator state exists, so a request draws the same numbers in any batch, slot or chunking, after a preemption
and with any number of steps in flight.
"""

import torch

_MASK_64 = (1 << 64) - 1


def as_int64(value: int) -> int:
    """`value` modulo 2**64 as a signed 64-bit integer."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


# Increment and multipliers of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
_INCREMENT = as_int64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = as_int64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = as_int64(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of an int64 tensor (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64: a bijection of 64-bit integers, wrapping arithmetic."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """One number of [0, 1) for each (seed, output position). int64 [n], int64 [n] -> float64 [n].

    The seed is mixed before the position enters, so that neighbouring seeds give unrelated sequences.
    """
    bits = _mix(_mix(seed + _INCREMENT) + (position + 1) * _INCREMENT)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53
