"""Sources of weights: files that give runs of elements of a named tensor, as CPU tensors of whatever type they hold.

Reads are positioned (`pread`) and go to buffers of the caller's, so any number of threads may share a source. Nothing
is mapped and nothing is kept.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from tokenmill_engine.config.gguf_file import GGML_TYPES, GGUFTensor, read_gguf
from tokenmill_engine.config.hf_folder import SafetensorsEntry, list_safetensors, read_safetensors_header
from tokenmill_engine.errors import ConfigError

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_GGUF_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightSource(ABC):
    """All tensors of one checkpoint."""

    shapes: Mapping[str, tuple[int, ...]]
    """By the checkpoint's own names."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The floating-point type that `read` gives. Raises ConfigError for a type that cannot be read."""

    @abstractmethod
    def read(self, name: str, first: int, count: int, buffer: torch.Tensor) -> torch.Tensor:
        """Elements [first, first + count) of a tensor in row-major order, [count] of `dtype`.

        `first` and `count` are whole numbers of the tensor's rows. What needs no conversion is read into `buffer`
        (uint8, of exactly the size of the result, contiguous), and the result is a view of it. Raises ConfigError for
        a type that cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""


class CheckpointSource(WeightSource):
    """The files themselves."""

    @abstractmethod
    def read_columns(self, name: str, rows: range, columns: range, buffer: torch.Tensor) -> torch.Tensor:
        """Some columns of some rows of a matrix, row by row, [len(rows) * len(columns)] of `dtype`; `buffer` and errors
        as in `read`."""


class _Files:
    """Descriptors of the files that a source reads, opened once."""

    def __init__(self, paths: set[str]) -> None:
        self._descriptors = {path: os.open(path, os.O_RDONLY) for path in paths}

    def read(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. Raises ConfigError if the file got shorter since it was checked."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._descriptors[path], [buffer[done:]], offset + done)
            if got == 0:
                raise ConfigError(f"{path} is truncated: nothing at byte {offset + done}; download it again")
            done += got

    def read_pieces(self, path: str, offsets: range, buffer: memoryview) -> None:
        """Fill `buffer` with as many pieces of equal length as there are `offsets`. Raises ConfigError as `read`."""
        length = len(buffer) // len(offsets)
        for index, offset in enumerate(offsets):
            self.read(path, offset, buffer[index * length : (index + 1) * length])

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class SafetensorsSource(CheckpointSource):
    """A folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        entries = [entry for shard in list_safetensors(folder) for entry in read_safetensors_header(shard)]
        self._entries: dict[str, SafetensorsEntry] = {entry.name: entry for entry in entries}
        self.shapes = {entry.name: entry.shape for entry in entries}
        self._files = _Files({str(entry.path) for entry in entries})

    def dtype(self, name: str) -> torch.dtype:
        entry = self._entries[name]
        dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(
                f"{entry.path}: tensor {name} has type {entry.dtype}; quantized weights are not supported"
            )
        return dtype

    def read(self, name: str, first: int, count: int, buffer: torch.Tensor) -> torch.Tensor:
        entry, dtype = self._entries[name], self.dtype(name)
        self._files.read(str(entry.path), entry.offset + first * dtype.itemsize, buffer.numpy().data)
        return buffer.view(dtype)

    def read_columns(self, name: str, rows: range, columns: range, buffer: torch.Tensor) -> torch.Tensor:
        entry, dtype = self._entries[name], self.dtype(name)
        offsets = _offsets(entry.offset + columns.start * dtype.itemsize, entry.shape[1] * dtype.itemsize, rows)
        self._files.read_pieces(str(entry.path), offsets, buffer.numpy().data)
        return buffer.view(dtype)

    def close(self) -> None:
        self._files.close()


class GGUFSource(CheckpointSource):
    """A GGUF file, or the parts of a split one. Quantized tensors come as float32."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, GGUFTensor] = read_gguf(path).tensors
        self.shapes = {tensor.name: tensor.shape for tensor in self._tensors.values()}
        self._files = _Files({tensor.path for tensor in self._tensors.values()})

    def dtype(self, name: str) -> torch.dtype:
        return _GGUF_DTYPES.get(GGML_TYPES[self._tensors[name].type_id].name, torch.float32)

    def read(self, name: str, first: int, count: int, buffer: torch.Tensor) -> torch.Tensor:
        tensor = self._tensors[name]
        storage = GGML_TYPES[tensor.type_id]
        offset = tensor.offset + first // storage.block_size * storage.block_bytes
        if storage.name in _GGUF_DTYPES:
            self._files.read(tensor.path, offset, buffer.numpy().data)
            return buffer.view(_GGUF_DTYPES[storage.name])
        blocks = np.empty(count // storage.block_size * storage.block_bytes, np.uint8)
        self._files.read(tensor.path, offset, blocks.data)
        return self._dequantized(tensor, blocks)

    def read_columns(self, name: str, rows: range, columns: range, buffer: torch.Tensor) -> torch.Tensor:
        tensor = self._tensors[name]
        storage = GGML_TYPES[tensor.type_id]
        first, last = columns.start // storage.block_size, -(-columns.stop // storage.block_size)
        row_bytes = tensor.shape[1] // storage.block_size * storage.block_bytes
        offsets = _offsets(tensor.offset + first * storage.block_bytes, row_bytes, rows)
        if storage.name in _GGUF_DTYPES:
            self._files.read_pieces(tensor.path, offsets, buffer.numpy().data)
            return buffer.view(_GGUF_DTYPES[storage.name])
        blocks = np.empty(len(rows) * (last - first) * storage.block_bytes, np.uint8)
        self._files.read_pieces(tensor.path, offsets, blocks.data)
        values = self._dequantized(tensor, blocks).view(len(rows), -1)
        # The part may begin or end inside a block.
        before = columns.start - first * storage.block_size
        return values[:, before : before + len(columns)].reshape(-1)

    def _dequantized(self, tensor: GGUFTensor, blocks: NDArray[np.uint8]) -> torch.Tensor:
        """float32, one dimension, of whole blocks."""
        try:
            # One long row: gguf works in groups of 16 rows, and with short rows Python takes most of the time.
            values = quants.dequantize(blocks[None], GGMLQuantizationType(tensor.type_id))
        except NotImplementedError as error:
            raise ConfigError(
                f"{tensor.path}: tensor {tensor.name} has type {tensor.type_name}, which cannot be read"
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(-1))

    def close(self) -> None:
        self._files.close()


def _offsets(first: int, row_bytes: int, rows: range) -> range:
    """Where something begins in each of `rows`, of those that are `row_bytes` apart, the first one's at `first`."""
    return range(first + rows.start * row_bytes, first + rows.stop * row_bytes, row_bytes)
