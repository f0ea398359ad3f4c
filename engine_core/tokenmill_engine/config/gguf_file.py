"""Reads the header of a GGUF file: metadata and where each tensor lies. Knows nothing of models. Torch-free.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian). The whole header
of a 150 000-token vocabulary is read in well under a second, so every process may read it for itself. Tensor data
is never touched here: `GGUFTensor` says where it is, `gguf.quants.dequantize` says what it means.
"""

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenmill_engine.errors import ConfigError

MetadataValue = bool | int | float | str | list[Any]

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}


class GGMLType(NamedTuple):
    """How a tensor's elements are stored: rows of blocks of `block_size` elements, `block_bytes` bytes each."""

    name: str
    block_size: int
    block_bytes: int


GGML_TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 40),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
    40: GGMLType("NVFP4", 64, 36),
    41: GGMLType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a file."""

    name: str
    path: str
    """The file that holds it: models may be split over several."""
    shape: tuple[int, ...]
    """Row-major, as torch and numpy count: the file stores it reversed."""
    type_id: int
    """Key of `GGML_TYPES`, value of `gguf.GGMLQuantizationType`."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int

    @property
    def type_name(self) -> str:
        return GGML_TYPES[self.type_id].name


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a model: of the first file, plus the tensors of all its parts."""

    path: str
    metadata: dict[str, MetadataValue]
    tensors: dict[str, GGUFTensor]

    def require(self, key: str) -> MetadataValue:
        """The value of a key that a usable model has. Raises ConfigError if it is absent."""
        if key not in self.metadata:
            raise ConfigError(f"GGUF file {self.path} has no metadata key {key!r}")
        return self.metadata[key]


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is a file that should be read as GGUF (by name or by its first bytes)."""
    file = Path(path)
    if not file.is_file():
        return False
    if file.suffix == ".gguf":
        return True
    with file.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def read_gguf(path: str | Path) -> GGUFFile:
    """Header of the model that `path` is, or is the first part of (`…-00001-of-0000N.gguf`).

    Raises ConfigError, naming the file, if it is missing, not GGUF, of an unknown version, or cut short.
    """
    parts = _split_parts(Path(path))
    header = _read_header(parts[0])
    tensors = dict(header.tensors)
    for part in parts[1:]:
        tensors.update(_read_header(part).tensors)
    return GGUFFile(path=str(parts[0]), metadata=header.metadata, tensors=tensors)


def _split_parts(path: Path) -> list[Path]:
    match = _SPLIT_NAME.match(path.name)
    count = int(match["count"]) if match else 1
    if match is None or count < 1:
        return [path]
    parts = [path.with_name(f"{match['stem']}-{index:05d}-of-{count:05d}.gguf") for index in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(f"GGUF model {path} is split into {count} files and {', '.join(missing)} is missing")
    return parts


def _read_header(path: Path) -> GGUFFile:
    try:
        with path.open("rb") as stream:
            if path.stat().st_size == 0:
                raise ConfigError(f"GGUF file {path} is empty")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderParser(path, data).parse()
    except OSError as error:
        raise ConfigError(f"cannot read GGUF file {path}: {error.strerror or error}") from error
    except struct.error as error:
        raise ConfigError(f"GGUF file {path} is truncated inside its header; download it again") from error


class _HeaderParser:
    """Walks the header once. Reads past the end raise struct.error, which `_read_header` words."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._readers: dict[int, Callable[[], MetadataValue]] = {_STRING: self._string, _ARRAY: self._array}

    def parse(self) -> GGUFFile:
        if self._data[:4] != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file (it does not start with {_MAGIC.decode()!r})")
        self._position = 4
        version = self._u32()
        if version not in _SUPPORTED_VERSIONS:
            hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
            supported = " and ".join(map(str, _SUPPORTED_VERSIONS))
            raise ConfigError(f"GGUF file {self._path} has version {version}{hint}; versions {supported} are supported")
        num_tensors, num_pairs = self._u64(), self._u64()
        metadata = {}
        for _ in range(num_pairs):
            key = self._string()
            metadata[key] = self._value(self._u32())
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ConfigError(f"GGUF file {self._path} has an invalid general.alignment of {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        tensors = {info.name: self._placed(info, data_start) for info in infos}
        return GGUFFile(path=str(self._path), metadata=metadata, tensors=tensors)

    def _placed(self, info: GGUFTensor, data_start: int) -> GGUFTensor:
        end = data_start + info.offset + info.nbytes
        if end > self._size:
            raise ConfigError(
                f"GGUF file {self._path} is truncated: tensor {info.name} ends at byte {end}, "
                f"the file has {self._size}; download it again"
            )
        return GGUFTensor(
            info.name, info.path, info.shape, info.type_id, offset=data_start + info.offset, nbytes=info.nbytes
        )

    def _tensor_info(self) -> GGUFTensor:
        """The next tensor, its offset still relative to the data section."""
        name = self._string()
        num_dims = self._u32()
        if num_dims > _MAX_DIMENSIONS:
            raise ConfigError(f"GGUF file {self._path} is damaged: tensor {name!r} has {num_dims} dimensions")
        shape = tuple(reversed([self._u64() for _ in range(num_dims)]))
        type_id = self._u32()
        if type_id not in GGML_TYPES:
            raise ConfigError(f"GGUF file {self._path}: tensor {name!r} has unknown type {type_id}")
        storage = GGML_TYPES[type_id]
        if shape and shape[-1] % storage.block_size:
            raise ConfigError(
                f"GGUF file {self._path} is damaged: rows of {shape[-1]} elements of {storage.name} tensor {name!r} "
                f"are no whole number of blocks of {storage.block_size}"
            )
        num_elements = 1
        for extent in shape:
            num_elements *= extent
        nbytes = num_elements // storage.block_size * storage.block_bytes
        return GGUFTensor(name, str(self._path), shape, type_id, offset=self._u64(), nbytes=nbytes)

    def _value(self, type_id: int) -> MetadataValue:
        reader = self._readers.get(type_id)
        return reader() if reader is not None else self._scalars(type_id, 1)[0]

    def _array(self) -> list[Any]:
        type_id = self._u32()
        count = self._u64()
        if type_id == _STRING:
            return self._strings(count)
        return self._scalars(type_id, count)

    def _scalars(self, type_id: int, count: int) -> list[Any]:
        if type_id not in _SCALARS:
            raise ConfigError(f"GGUF file {self._path} is damaged: unknown metadata type {type_id}")
        dtype = _SCALARS[type_id]
        start = self._position
        self._skip(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self._data[start : self._position], dtype).tolist()
        return values

    def _strings(self, count: int) -> list[str]:
        data, position, unpack = self._data, self._position, _U64.unpack_from
        values = []
        for _ in range(count):
            start = position + 8
            (length,) = unpack(data, position)
            position = start + length
            if position > self._size:
                raise struct.error("past the end of the file")
            values.append(data[start:position])
        self._position = position
        return [value.decode("utf-8", "replace") for value in values]

    def _string(self) -> str:
        return self._strings(1)[0]

    def _u32(self) -> int:
        start = self._position
        self._position += 4
        return int(_U32.unpack_from(self._data, start)[0])

    def _u64(self) -> int:
        start = self._position
        self._position += 8
        return int(_U64.unpack_from(self._data, start)[0])

    def _skip(self, nbytes: int) -> None:
        self._position += nbytes
        if self._position > self._size:
            raise struct.error("past the end of the file")
