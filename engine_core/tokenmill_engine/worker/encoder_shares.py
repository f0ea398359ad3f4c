"""Which of the workers that share each layer encodes an image and keeps its rows. Torch-free.

Embeddings are added up over these workers: rows that one of them has, and the others take for zeros, are where they
are needed without being sent. All workers come to the same answer by themselves, from the plan alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_engine.outputs import EncoderInput


@dataclass(frozen=True, slots=True)
class EncoderShare:
    """One worker's view."""

    rank: int = 0
    size: int = 1
    computes_together: bool = False
    """Each worker has a part of the encoder, and all compute every image; otherwise each has all of it, and computes
    the images whose rows it keeps."""

    def keepers(self, images: Sequence[EncoderInput]) -> list[int]:
        """Which worker keeps the rows of each of the `images` of a step."""
        if self.computes_together:
            return [image.entry % self.size for image in images]
        first = images[0].entry if images else 0
        return split_evenly([num_patches(image) for image in images], self.size, first)

    def computes(self, keeper: int) -> bool:
        """Whether this worker has a part in encoding an image whose rows `keeper` keeps."""
        return self.computes_together or keeper == self.rank


def num_patches(image: EncoderInput) -> int:
    """What encoding it costs, next to other images of the same model."""
    return image.num_tokens if image.grid is None else math.prod(image.grid)


def split_evenly(costs: Sequence[int], size: int, first: int = 0) -> list[int]:
    """The worker of each item, such that the one with the most has little more than the others: the largest item goes
    first, each to who has the least so far (R. L. Graham 1969: within 4/3 of the best split). Among equals `first`
    modulo `size` comes first, so that single items are not always the same worker's."""
    loads = [0] * size
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = min(range(size), key=lambda rank: (loads[rank], (rank - first) % size))
        owners[index] = owner
        loads[owner] += costs[index]
    return owners
