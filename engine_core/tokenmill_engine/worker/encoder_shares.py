"""Which of the workers that share each layer encodes an image and keeps its rows.

Embeddings are added up over these workers: rows that one of them has, and the others take for zeros, are where they
are needed without being sent. All workers come to the same answer by themselves, from the plan alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.outputs import EncoderInput


@dataclass(frozen=True, slots=True)
class EncoderShare:
    """One worker's view."""

    group: Group = ALONE
    mode: EncoderMode = "weights"
    has_views: bool = False
    """Grids of images count views of one size, instead of patches."""

    @classmethod
    def of(cls, group: Group, model: ModelConfig) -> Self:
        """Of a worker in `group`."""
        return cls(group, model.encoder_mode, model.media is not None and model.media.views is not None)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.group.rank

    @property
    def is_joint(self) -> bool:
        """Whether all workers compute every image, together. Then they must make the same calls."""
        return self.mode == "weights" and self.group.size > 1

    def keepers(self, images: Sequence[EncoderInput]) -> list[int]:
        """Which worker keeps the rows of each of the `images` of a step."""
        size = self.group.size
        if self.is_joint:
            return [image.entry % size for image in images]
        first = images[0].entry if images else 0
        return split_evenly([self._cost(image) for image in images], size, first)

    def _cost(self, image: EncoderInput) -> int:
        """What encoding an image takes, next to others of the same model: its patches, or its views."""
        if image.grid is None:
            return image.num_tokens
        return image.grid[0] if self.has_views else math.prod(image.grid)

    def computes(self, keeper: int) -> bool:
        """Whether this worker has a part in encoding an image whose rows `keeper` keeps."""
        return self.is_joint or keeper == self.rank

    def agreed(self, can: Sequence[bool]) -> list[bool]:
        """Of several images, which all that compute them can have. Who computes together is asked by all at once, about
        as many images, and hears the same."""
        if not self.is_joint or not can:
            return list(can)
        # One question is mostly enough.
        if self.group.agree_min(all(can)) == 1:
            return [True] * len(can)
        return [self.group.agree_min(each) == 1 for each in can]


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
