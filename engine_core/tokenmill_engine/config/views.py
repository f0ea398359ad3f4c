"""How LLaVA-OneVision (arXiv:2408.03326) sees an image of any size with a tower of one: whole, and in tiles of the size
that fits it best. Torch-free: a front end needs the numbers as well."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Crop:
    """What of the states of all tiles together belongs to the image: the rest is padding."""

    top: int
    left: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class ViewsConfig:
    """Sizes of a model's views. A view becomes `side` x `side` states; sizes of images are (height, width)."""

    sizes: tuple[tuple[int, int], ...]
    """Pixels of all tiles together that an image may be brought to, each a multiple of `view_size`."""
    max_views: int
    """States of tiles are shrunk to those of about as many."""
    view_size: int
    """Pixels on a side of a tile."""
    side: int

    @property
    def pooled_side(self) -> int:
        """States on a side of a frame of a video."""
        return math.ceil(self.side / 2)

    def best_size(self, height: int, width: int) -> tuple[int, int]:
        """Of `sizes` the one in which the image keeps the most pixels; of several the smallest, or the first."""
        best, best_rank = self.sizes[0], (-1, 0)
        for size in self.sizes:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), height * width)
            rank = (kept, kept - size[0] * size[1])
            if rank > best_rank:
                best, best_rank = size, rank
        return best

    def num_tiles(self, height: int, width: int) -> int:
        """Tiles of an image, beside the view of the whole."""
        best = self.best_size(height, width)
        return best[0] * best[1] // self.view_size**2

    def crop(self, height: int, width: int) -> Crop:
        """Of the states of all tiles in their places."""
        best = self.best_size(height, width)
        rows, columns = (length // self.view_size * self.side for length in best)
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
            return Crop(top, 0, rows - 2 * top, columns)
        left = (columns - int(round(width * (rows / height), 7))) // 2
        return Crop(0, left, rows, columns - 2 * left)

    def shrunk(self, crop: Crop) -> tuple[int, int]:
        """(rows, columns) that the states of the tiles become."""
        ratio = math.sqrt(crop.rows * crop.columns / (self.max_views * self.side**2))
        if ratio <= 1.1:
            return crop.rows, crop.columns
        return int(crop.rows // ratio), int(crop.columns // ratio)

    def num_rows(self, num_views: int, height: int, width: int) -> int:
        """Rows that an image of so many views becomes: states, and the end of each line of them. Of one view alone they
        are one line."""
        if num_views == 1:
            return self.side**2 + 1
        rows, columns = self.shrunk(self.crop(height, width))
        return self.side**2 + rows * (columns + 1)

    def num_video_rows(self, num_frames: int) -> int:
        """Rows that a video becomes: all frames are one line."""
        return num_frames * self.pooled_side**2 + 1
