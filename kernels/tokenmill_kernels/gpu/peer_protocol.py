"""How kernels of several GPUs hand each other numbers through memory that all of them map, without a barrier.

Every member of a group has a receive area of three slots. A call of a collective is one kernel on each member: it
pushes what it has into the others' slots, where nothing else is ever written, and polls its own until all has come. A
place that is empty holds `EMPTY`, all bits one: a NaN that nothing computes, and that is pushed as another NaN. So what
is there says so itself; no store has to come before another one, and no fence is needed.

Call number n uses slot n % 3. It also empties the slot of call n - 1, for call n + 2. Why that is safe, for a member M:
- What others push finds empty places. Whoever pushes in call n + 2 has ended call n + 1, for which it needed what M
  pushed in it, be it as part of a sum. So M had ended call n, and with it the emptying.
- A slot is read to the end before it is emptied, by kernels of one stream that run one after the other.
- Nobody pushes into a slot that M still reads: whoever is in call n + 3 has ended call n + 2, so M had ended call n.
Members therefore make the same calls, each with something to push, and those of one member do not overlap. Which slot
is next stands in device memory, and so does what the last call filled: kernels go on from there, in whichever graphs
they are. A program pushes before it waits, and waits only for the programs of its number on the other members. All
programs of a launch find room on the device at once, so none of them waits for one that cannot start.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NUM_SLOTS = 3
EMPTY = -1
"""What empty places hold, as integers of the width of the numbers."""
FILL = 0xFF
"""The bytes of those."""
UNIT_BYTES = 16
"""What calls fill of a slot is counted in units of so many bytes."""
NUM_STATE_WORDS = 3
"""int32 words of a member's state, zero at first: the next slot, programs that have begun the call, and how many units
of its slot the call before has filled."""

_NUM_SLOTS, _EMPTY, _WORDS = tl.constexpr(NUM_SLOTS), tl.constexpr(EMPTY), tl.constexpr(UNIT_BYTES // 4)
_CLEAR_BLOCK = tl.constexpr(2048)


@dataclass(frozen=True, slots=True)
class Peers:
    """A group as one member sees it. Its receive area has NUM_SLOTS * slot_bytes bytes, all of them FILL at first."""

    rank: int
    size: int
    addresses: torch.Tensor
    """int64 [size], on the device: where the receive area of each member is mapped here."""
    state: torch.Tensor
    """int32 [NUM_STATE_WORDS], on the device, zeros at first."""
    slot_bytes: int
    """A multiple of UNIT_BYTES."""


@triton.jit
def begin(state_ptr):
    """(slot of this call, units of the slot before it that are to be emptied)."""
    return tl.load(state_ptr), tl.load(state_ptr + 2)


@triton.jit
def count_and_clear(peers_ptr, state_ptr, slot, filled_before, filled_now, slot_bytes, rank):
    """To be called once by every program, after it has pushed and before it waits: lets the next call find the next
    slot, and empties the one of the call before. `filled_now` are the units that this call fills, gaps included."""
    # Every thread of every program has read the state before it changes.
    tl.debug_barrier()
    # Relaxed: a fence would wait until everything that was pushed has arrived.
    if tl.atomic_add(state_ptr + 1, 1, sem="relaxed") == tl.num_programs(0) - 1:
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr, (slot + 1) % _NUM_SLOTS)
        tl.store(state_ptr + 2, filled_now)
    last_ptr = area(peers_ptr, rank, (slot + _NUM_SLOTS - 1) % _NUM_SLOTS, slot_bytes, tl.int32)
    num_words = filled_before * _WORDS
    for start in range(tl.program_id(0) * _CLEAR_BLOCK, num_words, tl.num_programs(0) * _CLEAR_BLOCK):
        words = start + tl.arange(0, _CLEAR_BLOCK)
        tl.store(last_ptr + words, tl.full((_CLEAR_BLOCK,), _EMPTY, tl.int32), mask=words < num_words)


@triton.jit
def area(peers_ptr, member, slot, slot_bytes, bits: tl.constexpr):
    """Where a slot of `member` begins, as integers of type `bits`."""
    address = tl.load(peers_ptr + member) + slot.to(tl.int64) * slot_bytes
    return tl.multiple_of(address.to(tl.pointer_type(bits)), 16)


@triton.jit
def as_bits(x, bits: tl.constexpr):
    """Numbers as what is pushed: never EMPTY."""
    pattern = x.to(bits, bitcast=True)
    # All bits but the sign's: the NaN that operations give.
    return tl.where(pattern == _EMPTY, 0x7FFF if bits == tl.int16 else 0x7FFFFFFF, pattern)


@triton.jit
def push_to_others(peers_ptr, slot, slot_bytes, places, pattern, inside, rank, size: tl.constexpr, bits: tl.constexpr):
    """The same to every other member, the next one first."""
    for step in tl.static_range(size - 1):
        target_ptr = area(peers_ptr, (rank + 1 + step) % size, slot, slot_bytes, bits)
        tl.store(target_ptr + places, pattern, mask=inside)


@triton.jit
def received(area_ptr, places, inside):
    """What `places` of this member's slot hold now."""
    return tl.load(area_ptr + places, mask=inside, other=0, volatile=True)


@triton.jit
def received_sum(area_ptr, places, source_size, own, inside, rank, size: tl.constexpr, dtype: tl.constexpr):
    """(float32 sum of what all members' parts of this member's slot hold in `places` now, in the order of ranks; where
    one is empty, and the sum a NaN). From part to part it is `source_size`; `own` is what this member would push."""
    total = tl.zeros(own.shape, tl.float32)
    missing = tl.zeros(own.shape, tl.int1)
    # A tensor of one number: the interpreter cannot combine a mask with a scalar.
    me = rank + tl.arange(0, 1)[:, None]
    # All loads are under way at once.
    for source in tl.static_range(size):
        is_other = me != source
        part = tl.load(area_ptr + source * source_size + places, mask=inside & is_other, other=0, volatile=True)
        missing = missing | (part == _EMPTY)
        total += tl.where(is_other, part, own).to(dtype, bitcast=True).to(tl.float32)
    return total, missing


@triton.jit
def is_missing(pattern):
    """Whether any place is empty."""
    return is_any(pattern == _EMPTY)


@triton.jit
def is_any(flags):
    """One flag for a tensor of flags."""
    return tl.max(flags.to(tl.int32), axis=None) != 0


@triton.jit
def has_nan(squares):
    """Whether a tensor of squares or sums of squares has a NaN."""
    total = tl.sum(squares, axis=None)
    return total != total
