"""What one of several workers reads of a checkpoint."""

from collections.abc import Mapping

import torch

from tokenmill_engine.layers.placement import Share
from tokenmill_engine.models.weights import CheckpointSource, WeightSource


class PartSource(WeightSource):
    """Parts of another source's tensors, as if they were the whole ones. Only they are read: of a part of the columns
    each row by itself, and with quantized types the blocks that the part touches."""

    def __init__(self, source: CheckpointSource, parts: Mapping[str, tuple[str, tuple[Share, ...]]]) -> None:
        """What each name here stands for: a tensor of `source`, and its part, one share for each dimension."""
        self._source = source
        self._parts = parts
        self.shapes = {name: tuple(share.count for share in part) for name, (_, part) in parts.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._parts[name][0])

    def read(self, name: str, first: int, count: int, buffer: torch.Tensor) -> torch.Tensor:
        name, (rows, *columns) = self._parts[name]
        if not columns:
            return self._source.read(name, rows.first + first, count, buffer)
        width = columns[0]
        first_row, num_rows = rows.first + first // width.count, count // width.count
        if width.is_whole:
            return self._source.read(name, first_row * width.count, count, buffer)
        return self._source.read_columns(
            name, range(first_row, first_row + num_rows), range(width.first, width.first + width.count), buffer
        )

    def close(self) -> None:
        self._source.close()
