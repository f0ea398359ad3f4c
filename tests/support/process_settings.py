"""What a process has set for all that runs in it."""

import ctypes

_BLOCK_BYTES = 16 << 20


class _Allocations(ctypes.Structure):
    """glibc's `mallinfo2`."""

    _fields_ = [(f"field {number}", ctypes.c_size_t) for number in range(10)]


def returns_large_blocks() -> bool:
    """Whether a block of memory goes back to the system when it is free, though one as large was seen before."""
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.mallinfo2.restype = _Allocations
    library.free(library.malloc(_BLOCK_BYTES))
    before = _num_mapped(library)
    block = library.malloc(_BLOCK_BYTES)
    after = _num_mapped(library)
    library.free(block)
    return after > before


def _num_mapped(library: ctypes.CDLL) -> int:
    """Blocks that are mappings of their own."""
    return int(getattr(library.mallinfo2(), "field 3"))
