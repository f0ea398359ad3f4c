"""The encoder of LLaVA-OneVision (arXiv:2408.03326): a tower of one size of image sees each in several views, the whole
and tiles of it. States of tiles are put together, freed of padding, shrunk if they are many, and lines of them end with
a learned row. Frames of a video are seen whole, and their states pooled."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from tokenmill_engine.config.media import VisionConfig
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_engine.models.vision.blocks import SumShape
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.models.vision.tower import VisionTower

_VIEWS_AT_A_TIME = 16
"""Of all images: the states of more would take gigabytes."""


class OneVision:
    """A tower and what is done with its views."""

    def __init__(self, config: VisionConfig, views: ViewsConfig, placement: Placement) -> None:
        self._tower, self._views = VisionTower(config, placement), views
        self._line_end = placement.empty(config.output_size)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """As in `VisionEncoder`."""
        yield from self._tower.targets()
        yield "image_newline", Target.of_whole(self._line_end)

    def finalize(self) -> None:
        """As in `VisionEncoder`."""
        self._tower.finalize()

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """As in `VisionEncoder`; "pixel_values" [num_views, num_channels, size, size], the whole image first, and a
        grid of (num_views, height, width), the pixels of the image as it was. Views of a video are its frames, and its
        grid (num_frames, size, size)."""
        grids = [self._checked_grid(image) for image in images]
        states = [state for views in _batches(images) for state in self._tower.encode(views)]
        rows, first = [], 0
        for grid, image in zip(grids, images, strict=True):
            of_image = states[first : first + grid[0]]
            rows.append(self._pooled(of_image) if image.is_video else self._joined(of_image, grid[1:]))
            first += grid[0]
        return rows

    def sums(self, images: Sequence[ImageInput]) -> Iterator[SumShape]:
        """As in `VisionEncoder`."""
        for image in images:
            self._checked_grid(image)
        for views in _batches(images):
            yield from self._tower.sums(views)

    def _pooled(self, states: list[torch.Tensor]) -> torch.Tensor:
        """States of each frame [side**2, width] -> [num_rows, width]."""
        side, wanted = self._views.side, self._views.pooled_side
        frames = torch.stack(states).view(len(states), side, side, -1).permute(0, 3, 1, 2)
        pooled = F.interpolate(frames, (wanted, wanted), mode="bilinear").permute(0, 2, 3, 1)
        return torch.cat((pooled.flatten(0, 2), self._line_end[None]))

    def _joined(self, states: list[torch.Tensor], image_size: tuple[int, int]) -> torch.Tensor:
        """States of each view [side**2, width] -> [num_rows, width]."""
        whole, *tiles = states
        if not tiles:
            return torch.cat((whole, self._line_end[None]))
        height, width = self._views.best_size(*image_size)
        rows, columns, side = height // self._views.view_size, width // self._views.view_size, self._views.side
        square = torch.stack(tiles).view(rows, columns, side, side, -1).permute(4, 0, 2, 1, 3)
        square = square.reshape(len(square), rows * side, columns * side)
        crop = self._views.crop(*image_size)
        square = square[:, crop.top : crop.top + crop.rows, crop.left : crop.left + crop.columns]
        wanted = self._views.shrunk(crop)
        if wanted != (crop.rows, crop.columns):
            square = F.interpolate(square[None], wanted, mode="bilinear")[0]
        ends = self._line_end[:, None, None].expand(-1, wanted[0], 1)
        lines = torch.cat((square, ends), dim=2).flatten(1).T
        return torch.cat((whole, lines))

    def _checked_grid(self, image: ImageInput) -> tuple[int, int, int]:
        grid = image.grid
        if grid is None or min(grid) < 1 or not self._belongs(grid, image.is_video):
            raise ValueError(f"an image needs a grid of (views, height, width) that belong together, not {grid}")
        if image.pixel_values.dim() != 4 or len(image.pixel_values) != grid[0]:
            raise ValueError(f"{grid[0]} views have pixels of four dimensions, not {list(image.pixel_values.shape)}")
        return grid

    def _belongs(self, grid: tuple[int, int, int], is_video: bool) -> bool:
        num_views, *size = grid
        if is_video:
            return size == [self._views.view_size] * 2
        return num_views in (1, 1 + self._views.num_tiles(*size))


def _batches(images: Sequence[ImageInput]) -> Iterator[list[ImageInput]]:
    """The views of all images, in order."""
    views = [ImageInput(view) for image in images for view in image.pixel_values]
    for first in range(0, len(views), _VIEWS_AT_A_TIME):
        yield views[first : first + _VIEWS_AT_A_TIME]
