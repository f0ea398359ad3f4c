"""Sources of weights: files that give runs of elements of a named tensor, as CPU tensors of whatever type they hold.

Reads are positioned (`pread`), so any number of threads may share a source. Nothing is mapped and nothing is kept:
memory use is one run per thread.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants

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
    def read(self, name: str, first: int, count: int, pinned: bool) -> torch.Tensor:
        """Elements [first, first + count) of a tensor in row-major order, floating point [count].

        `first` and `count` are whole numbers of the tensor's rows. `pinned` asks for page-locked memory, from which
        copies to a GPU need no staging. Raises ConfigError for a type that cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the files."""


class _Files:
    """Descriptors of the files that a source reads, opened once."""

    def __init__(self, paths: set[str]) -> None:
        self._descriptors = {path: os.open(path, os.O_RDONLY) for path in paths}

    def read(self, path: str, offset: int, nbytes: int, pinned: bool) -> torch.Tensor:
        """uint8 [nbytes] from `offset` on. Raises ConfigError if the file got shorter since it was checked."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        view, done = buffer.numpy().data, 0
        while done < nbytes:
            got = os.preadv(self._descriptors[path], [view[done:]], offset + done)
            if got == 0:
                raise ConfigError(f"{path} is truncated: nothing at byte {offset + done}; download it again")
            done += got
        return buffer

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class SafetensorsSource(WeightSource):
    """A folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        entries = [entry for shard in list_safetensors(folder) for entry in read_safetensors_header(shard)]
        self._entries: dict[str, SafetensorsEntry] = {entry.name: entry for entry in entries}
        self.shapes = {entry.name: entry.shape for entry in entries}
        self._files = _Files({str(entry.path) for entry in entries})

    def read(self, name: str, first: int, count: int, pinned: bool) -> torch.Tensor:
        entry = self._entries[name]
        dtype = _SAFETENSORS_DTYPES.get(entry.dtype)
        if dtype is None:
            raise ConfigError(
                f"{entry.path}: tensor {name} has type {entry.dtype}; quantized weights are not supported"
            )
        size = dtype.itemsize
        return self._files.read(str(entry.path), entry.offset + first * size, count * size, pinned).view(dtype)

    def close(self) -> None:
        self._files.close()


class GGUFSource(WeightSource):
    """A GGUF file, or the parts of a split one. Quantized tensors come as float32."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, GGUFTensor] = read_gguf(path).tensors
        self.shapes = {tensor.name: tensor.shape for tensor in self._tensors.values()}
        self._files = _Files({tensor.path for tensor in self._tensors.values()})

    def read(self, name: str, first: int, count: int, pinned: bool) -> torch.Tensor:
        tensor = self._tensors[name]
        storage = GGML_TYPES[tensor.type_id]
        offset = tensor.offset + first // storage.block_size * storage.block_bytes
        nbytes = count // storage.block_size * storage.block_bytes
        dtype = _GGUF_DTYPES.get(storage.name)
        if dtype is not None:
            return self._files.read(tensor.path, offset, nbytes, pinned).view(dtype)
        blocks = self._files.read(tensor.path, offset, nbytes, pinned=False).numpy()
        try:
            # One long row: gguf works in groups of 16 rows, and with short rows Python takes most of the time.
            values = quants.dequantize(blocks.reshape(1, nbytes), GGMLQuantizationType(tensor.type_id))
        except NotImplementedError as error:
            raise ConfigError(f"{tensor.path}: tensor {name} has type {storage.name}, which cannot be read") from error
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(count))

    def close(self) -> None:
        self._files.close()
