"""The vision encoders of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): images of any size, positions
by rotation in two dimensions, neighbouring patches merged at the end. In the second, most layers attend within windows.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from tokenmill_engine.config.media import VisionConfig
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.placement import Placement, Target, whole
from tokenmill_engine.models.vision.blocks import (
    EncoderLayer,
    LayerNames,
    LayerNorm,
    PlainMLP,
    Rotation,
    RowNorm,
    SiluMLP,
    SumShape,
)
from tokenmill_engine.models.vision.encoder import PREFIX, ImageInput
from tokenmill_engine.models.vision.grids import frame_lengths, patch_places, window_order
from tokenmill_engine.models.vision.packed import PackedRuns
from tokenmill_engine.mrope import Grid
from tokenmill_engine.sampling.transfer import to_device

_NAMES = LayerNames("norm1", "attn", ("qkv",), "proj", "norm2")
_THETA = 10000.0


class QwenVision:
    """The encoder of both."""

    def __init__(self, config: VisionConfig, placement: Placement) -> None:
        self._config, self._device, self._dtype = config, placement.device, placement.dtype
        width = config.hidden_size
        self._patches = Linear(whole(config.patch_dim), {"": whole(width)}, False, placement)
        self._layers = [self._layer(placement) for _ in range(config.num_layers)]
        self._merged_size = width * config.spatial_merge_size**2
        self._last_norm = self._norm(placement)
        self._merger = PlainMLP(
            (self._merged_size, self._merged_size, config.output_size), ("0", "2"), "gelu", placement
        )

    def _layer(self, placement: Placement) -> EncoderLayer:
        config, width = self._config, self._config.hidden_size
        norms, mlp = (
            (
                (LayerNorm(width, config.norm_eps, placement), LayerNorm(width, config.norm_eps, placement)),
                PlainMLP((width, config.intermediate_size, width), ("fc1", "fc2"), config.activation, placement),
            )
            if config.kind == "qwen2_vl"
            else (
                (RowNorm(width, config.norm_eps, placement), RowNorm(width, config.norm_eps, placement)),
                SiluMLP(width, config.intermediate_size, placement),
            )
        )
        return EncoderLayer(width, config.num_heads, norms, mlp, _NAMES, placement)

    def _norm(self, placement: Placement) -> LayerNorm | RowNorm:
        kind = LayerNorm if self._config.kind == "qwen2_vl" else RowNorm
        return kind(self._config.hidden_size, self._config.norm_eps, placement)

    def targets(self) -> Iterator[tuple[str, Target]]:
        """As in `VisionEncoder`."""
        config = self._config
        kernel = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        patches = self._patches.plain_weight.view(config.hidden_size, *kernel)
        yield f"{PREFIX}patch_embed.proj.weight", Target.of_whole(patches)
        for index, layer in enumerate(self._layers):
            yield from layer.targets(f"{PREFIX}blocks.{index}.")
        yield from self._last_norm.targets(f"{PREFIX}merger.ln_q")
        yield from self._merger.targets(f"{PREFIX}merger.mlp.")

    def finalize(self) -> None:
        """As in `VisionEncoder`."""
        self._patches.finalize()
        for layer in self._layers:
            layer.finalize()
        self._merger.finalize()

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """As in `VisionEncoder`; "pixel_values" [num_patches, patch_dim] with a grid."""
        config, unit = self._config, self._config.spatial_merge_size**2
        grids = [checked_grid(image, config) for image in images]
        pixels = torch.cat([image.pixel_values for image in images]).to(self._device, self._dtype)
        x, rotation = self._patches(pixels), turned_by_place(grids, config, self._device)
        whole_frames = windows = PackedRuns(frame_lengths(grids), self._device, self._dtype)
        order: torch.Tensor | None = None
        if config.window_size is not None:
            side = config.window_size // config.spatial_merge_size // config.patch_size
            squares, lengths = window_order(grids, config.spatial_merge_size, side)
            order, windows = to_device(squares, self._device), PackedRuns(lengths, self._device, self._dtype)
            rows = (order[:, None] * unit + torch.arange(unit, device=self._device)).flatten()
            x = x[rows]
            rotation = (rotation[0][rows], rotation[1][rows])
        for index, layer in enumerate(self._layers):
            is_windowed = order is not None and index not in config.full_attention_layers
            x = layer(x, windows if is_windowed else whole_frames, rotation)
        merged = self._merger(self._last_norm(x).view(-1, self._merged_size))
        if order is not None:
            merged = torch.empty_like(merged).index_copy_(0, order, merged)
        return list(torch.split(merged, [time * height * width // unit for time, height, width in grids]))

    def sums(self, images: Sequence[ImageInput]) -> Iterator[SumShape]:
        """As in `VisionEncoder`."""
        num_patches = sum(math.prod(checked_grid(image, self._config)) for image in images)
        for layer in self._layers:
            yield from layer.sums(num_patches)
        yield from self._merger.sums(num_patches // self._config.spatial_merge_size**2)


def checked_grid(image: ImageInput, config: VisionConfig) -> Grid:
    """Raises ValueError if it does not fit the pixels or what is merged."""
    grid, shape, merge = image.grid, image.pixel_values.shape, config.spatial_merge_size
    if grid is None or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
        raise ValueError(f"an image needs a grid whose height and width are multiples of {merge}, not {grid}")
    expected = (grid[0] * grid[1] * grid[2], config.patch_dim)
    if shape != expected:
        raise ValueError(f"an image of grid {grid} has pixels {list(expected)}, not {list(shape)}")
    return grid


def turned_by_place(grids: Sequence[Grid], config: VisionConfig, device: torch.device) -> Rotation:
    """The first half of each head's frequencies turns with the row of a patch, the second with its column."""
    half = config.head_dim // 2
    frequencies = 1.0 / (_THETA ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    places = to_device(patch_places(grids, config.spatial_merge_size), device)
    angles = (places[:, :, None] * to_device(frequencies.numpy(), device)).flatten(1)
    return angles.cos(), angles.sin()
