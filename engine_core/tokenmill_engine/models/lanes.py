"""The way of weights from files to their final place: every loading thread has a lane with buffers of its own.

Buffers are made once and used in turn. On a GPU they are page-locked, two to a lane: while one is copied to the
device, on a stream of the lane's own, the next run of elements is read into the other.
"""

import torch

from tokenmill_engine.models.weights import WeightSource

_NUM_BUFFERS = 2


class Lane:
    """Fills parameters on `device`. One thread uses it; `buffer_bytes` should hold a run of elements.

    `staged` runs go through buffers in the type and the memory order of their place; by default where memory is not
    shared, so that a device gets each of them in one piece.
    """

    def __init__(self, device: torch.device, buffer_bytes: int, *, staged: bool | None = None) -> None:
        on_gpu = device.type == "cuda"
        self._stream = _new_stream(device) if on_gpu else None
        self._scratch = torch.empty(buffer_bytes, dtype=torch.uint8)
        num_buffers = _NUM_BUFFERS if (on_gpu if staged is None else staged) else 0
        self._buffers = [_Buffer(buffer_bytes, pinned=on_gpu) for _ in range(num_buffers)]

    def copy(self, source: WeightSource, name: str, first: int, part: torch.Tensor) -> None:
        """Elements of tensor `name` from `first` on fill `part`, a view without gaps whose elements may lie in another
        order in memory. On a GPU they are there after the next `finish`. Raises ConfigError as `WeightSource.read`."""
        if not self._buffers:
            self._read(source, name, first, part)
            return
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.wait()
        staged = buffer.like(part)
        self._read(source, name, first, staged)
        with torch.cuda.stream(self._stream):
            part.copy_(staged, non_blocking=True)
        buffer.used_until(self._stream)

    def finish(self) -> None:
        """Waits for what is on its way to the device."""
        if self._stream is not None:
            self._stream.synchronize()

    def _read(self, source: WeightSource, name: str, first: int, out: torch.Tensor) -> None:
        """Into host memory: straight there if nothing is to be converted or put in another order."""
        dtype = source.dtype(name)
        if dtype == out.dtype and out.is_contiguous():
            buffer = out.view(-1).view(torch.uint8)
        else:
            buffer = _room(self._scratch, out.numel() * dtype.itemsize)
        values = source.read(name, first, out.numel(), buffer)
        if values.data_ptr() != out.data_ptr():
            out.copy_(values.view(out.shape))


class _Buffer:
    """Bytes of host memory, free again when the copy from them is done."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self._data = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until nothing reads the buffer any more."""
        if self._copied is not None:
            self._copied.synchronize()

    def like(self, part: torch.Tensor) -> torch.Tensor:
        """A view of the buffer with the shape, type and memory order of `part`."""
        return _room(self._data, part.nbytes).view(part.dtype).as_strided(part.shape, part.stride())

    def used_until(self, stream: torch.cuda.Stream | None) -> None:
        """What is on `stream` now still reads the buffer."""
        if self._copied is not None:
            self._copied.record(stream)


def _room(buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of `buffer`, or of new memory if it is too small."""
    return buffer[:num_bytes] if num_bytes <= len(buffer) else torch.empty(num_bytes, dtype=torch.uint8)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """For the calling thread, whose current device becomes `device`."""
    if device.index is not None:
        torch.cuda.set_device(device)
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
