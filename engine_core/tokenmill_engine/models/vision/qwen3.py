"""The vision encoder of Qwen3-VL (arXiv:2511.21631): images of any size, learned positions stretched over them beside
rotation in two dimensions, neighbouring patches merged at the end and behind some layers before (DeepStack)."""

import math
from collections.abc import Iterator, Sequence

import torch

from tokenmill_engine.config.media import VisionConfig
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.placement import Placement, Target, whole
from tokenmill_engine.models.vision.blocks import EncoderLayer, LayerNames, LayerNorm, PlainMLP, SumShape
from tokenmill_engine.models.vision.encoder import PREFIX, ImageInput
from tokenmill_engine.models.vision.grids import frame_lengths, patch_places
from tokenmill_engine.models.vision.packed import PackedRuns
from tokenmill_engine.models.vision.qwen import checked_grid, turned_by_place
from tokenmill_engine.mrope import Grid
from tokenmill_engine.sampling.transfer import to_device

_NAMES = LayerNames("norm1", "attn", ("qkv",), "proj", "norm2")
_MLP_NAMES = ("linear_fc1", "linear_fc2")


class Merger:
    """Squares of neighbouring patches become one row each."""

    def __init__(self, config: VisionConfig, norms_squares: bool, placement: Placement) -> None:
        """`norms_squares`: the norm is over a whole square, not over each of its patches."""
        self._square = config.spatial_merge_size**2
        merged = config.hidden_size * self._square
        self._merged_size, self._norms_squares = merged, norms_squares
        self._norm = LayerNorm(merged if norms_squares else config.hidden_size, config.norm_eps, placement)
        self._mlp = PlainMLP((merged, merged, config.output_size), _MLP_NAMES, "gelu", placement)

    def targets(self, prefix: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place) of every parameter."""
        yield from self._norm.targets(f"{prefix}norm")
        yield from self._mlp.targets(prefix)

    def finalize(self) -> None:
        """Packs the loaded weights."""
        self._mlp.finalize()

    def sums(self, num_patches: int) -> Iterator[SumShape]:
        """As in `PlainMLP`, by patches."""
        yield from self._mlp.sums(num_patches // self._square)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, hidden_size] -> [num_patches / merge_size**2, output_size]."""
        if self._norms_squares:
            return self._mlp(self._norm(x.view(-1, self._merged_size)))
        return self._mlp(self._norm(x).view(-1, self._merged_size))


class Qwen3Vision:
    """Rows are as wide as the decoder's states once for their embedding and once for each DeepStack layer."""

    def __init__(self, config: VisionConfig, placement: Placement) -> None:
        if config.positions_side is None:
            raise ValueError("the encoder has learned positions")
        self._config, self._device, self._dtype = config, placement.device, placement.dtype
        self._side = config.positions_side
        width, eps = config.hidden_size, config.norm_eps
        self._patches = Linear(whole(config.patch_dim), {"": whole(width)}, True, placement)
        self._positions = placement.empty(self._side**2, width)
        self._layers = [
            EncoderLayer(
                width,
                config.num_heads,
                (LayerNorm(width, eps, placement), LayerNorm(width, eps, placement)),
                PlainMLP((width, config.intermediate_size, width), _MLP_NAMES, config.activation, placement),
                _NAMES,
                placement,
            )
            for _ in range(config.num_layers)
        ]
        self._merger = Merger(config, False, placement)
        self._deepstack = {layer: Merger(config, True, placement) for layer in config.deepstack_layers}

    def targets(self) -> Iterator[tuple[str, Target]]:
        """As in `VisionEncoder`."""
        config, name = self._config, f"{PREFIX}patch_embed.proj"
        kernel = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        yield f"{name}.weight", Target.of_whole(self._patches.plain_weight.view(config.hidden_size, *kernel))
        if self._patches.bias is not None:
            yield f"{name}.bias", Target.of_whole(self._patches.bias)
        yield f"{PREFIX}pos_embed.weight", Target.of_whole(self._positions)
        for index, layer in enumerate(self._layers):
            yield from layer.targets(f"{PREFIX}blocks.{index}.")
        yield from self._merger.targets(f"{PREFIX}merger.")
        for index, merger in enumerate(self._deepstack.values()):
            yield from merger.targets(f"{PREFIX}deepstack_merger_list.{index}.")

    def finalize(self) -> None:
        """As in `VisionEncoder`."""
        self._patches.finalize()
        for layer in self._layers:
            layer.finalize()
        for merger in (self._merger, *self._deepstack.values()):
            merger.finalize()

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """As in `VisionEncoder`; "pixel_values" [num_patches, patch_dim] with a grid."""
        config = self._config
        grids = [checked_grid(image, config) for image in images]
        pixels = torch.cat([image.pixel_values for image in images]).to(self._device, self._dtype)
        x = self._patches(pixels)
        x = x + self._stretched(grids).to(x.dtype)
        rotation = turned_by_place(grids, config, self._device)
        runs = PackedRuns(frame_lengths(grids), self._device, self._dtype)
        deep = []
        for index, layer in enumerate(self._layers):
            x = layer(x, runs, rotation)
            if index in self._deepstack:
                deep.append(self._deepstack[index](x))
        rows = torch.cat((self._merger(x), *deep), dim=1) if deep else self._merger(x)
        return list(torch.split(rows, [_num_squares(grid, config.spatial_merge_size) for grid in grids]))

    def sums(self, images: Sequence[ImageInput]) -> Iterator[SumShape]:
        """As in `VisionEncoder`."""
        num_patches = sum(math.prod(checked_grid(image, self._config)) for image in images)
        for index, layer in enumerate(self._layers):
            yield from layer.sums(num_patches)
            if index in self._deepstack:
                yield from self._deepstack[index].sums(num_patches)
        yield from self._merger.sums(num_patches)

    def _stretched(self, grids: Sequence[Grid]) -> torch.Tensor:
        """The learned square, stretched over each image: float32 [num_patches, hidden_size], between the four nearest
        places of the square."""
        places = to_device(patch_places(grids, self._config.spatial_merge_size), self._device)
        sizes = torch.tensor([grid[1:] for grid in grids]).repeat_interleave(
            torch.tensor([time * height * width for time, height, width in grids]), dim=0
        )
        steps = to_device((sizes - 1).clamp(min=1).numpy(), self._device)
        wanted = places.float() * (self._side - 1) / steps
        below = wanted.floor()
        above_share, low = wanted - below, below.long()
        high = (low + 1).clamp(max=self._side - 1)
        total: torch.Tensor | None = None
        for rows, row_shares in ((low[:, 0], 1 - above_share[:, 0]), (high[:, 0], above_share[:, 0])):
            for columns, shares in ((low[:, 1], 1 - above_share[:, 1]), (high[:, 1], above_share[:, 1])):
                part = self._positions.index_select(0, rows * self._side + columns) * (row_shares * shares)[:, None]
                total = part if total is None else total.add_(part)
        assert total is not None
        return total


def _num_squares(grid: Grid, merge_size: int) -> int:
    return grid[0] * grid[1] * grid[2] // merge_size**2
