"""CLIP (arXiv:2103.00020) and SigLIP (arXiv:2303.15343) with LLaVA's projector (arXiv:2310.03744): images of one
size. Layers that the projector does not see the states of are left out."""

from collections.abc import Iterator, Sequence

import torch

from tokenmill_engine.config.media import VisionConfig
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.placement import Placement, Target, whole
from tokenmill_engine.models.vision.blocks import EncoderLayer, LayerNames, LayerNorm, PlainMLP, SumShape
from tokenmill_engine.models.vision.encoder import PREFIX, ImageInput
from tokenmill_engine.models.vision.packed import PackedRuns

_NAMES = LayerNames("layer_norm1", "self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj", "layer_norm2")


class VisionTower:
    """The encoder of LLaVA."""

    def __init__(self, config: VisionConfig, placement: Placement) -> None:
        if config.image_size is None:
            raise ValueError("a tower sees images of one size")
        self._config, self._device, self._dtype = config, placement.device, placement.dtype
        self._image_size = config.image_size
        self._side = config.image_size // config.patch_size
        width, eps = config.hidden_size, config.norm_eps
        self._is_clip = config.kind == "clip"
        self._patches = Linear(whole(config.patch_dim), {"": whole(width)}, not self._is_clip, placement)
        self._positions = placement.empty(self._side**2 + self._is_clip, width)
        self._class = placement.empty(width) if self._is_clip else None
        self._first_norm = LayerNorm(width, eps, placement) if self._is_clip else None
        self._layers = [
            EncoderLayer(
                width,
                config.num_heads,
                (LayerNorm(width, eps, placement), LayerNorm(width, eps, placement)),
                PlainMLP((width, config.intermediate_size, width), ("fc1", "fc2"), config.activation, placement),
                _NAMES,
                placement,
            )
            for _ in range(max(config.feature_layers))
        ]
        self._projector = PlainMLP(
            (width * len(config.feature_layers), config.output_size, config.output_size),
            ("linear_1", "linear_2"),
            config.projector_activation,
            placement,
            config.projector_bias,
        )

    def targets(self) -> Iterator[tuple[str, Target]]:
        """As in `VisionEncoder`."""
        config = self._config
        kernel = (config.hidden_size, config.num_channels, config.patch_size, config.patch_size)
        name = f"{PREFIX}embeddings.patch_embedding"
        yield f"{name}.weight", Target.of_whole(self._patches.plain_weight.view(kernel))
        if self._patches.bias is not None:
            yield f"{name}.bias", Target.of_whole(self._patches.bias)
        yield f"{PREFIX}embeddings.position_embedding.weight", Target.of_whole(self._positions)
        if self._class is not None:
            yield f"{PREFIX}embeddings.class_embedding", Target.of_whole(self._class)
        if self._first_norm is not None:
            # Spelled so in every checkpoint.
            yield from self._first_norm.targets(f"{PREFIX}pre_layrnorm")
        for index, layer in enumerate(self._layers):
            yield from layer.targets(f"{PREFIX}encoder.layers.{index}.")
        yield from self._projector.targets("multi_modal_projector.")

    def finalize(self) -> None:
        """As in `VisionEncoder`."""
        self._patches.finalize()
        for layer in self._layers:
            layer.finalize()
        self._projector.finalize()

    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """As in `VisionEncoder`; "pixel_values" [num_channels, image_size, image_size]."""
        shape = (self._config.num_channels, self._image_size, self._image_size)
        for image in images:
            if image.pixel_values.shape != shape:
                raise ValueError(f"the encoder sees pixels {list(shape)}, not {list(image.pixel_values.shape)}")
        x = self._embed(torch.stack([image.pixel_values for image in images]).to(self._device, self._dtype))
        count, length = x.shape[:2]
        runs = PackedRuns([length] * count, self._device, self._dtype)
        states = x.flatten(0, 1)
        wanted = {0: states}
        for index, layer in enumerate(self._layers):
            states = layer(states, runs)
            wanted[index + 1] = states
        features = torch.cat([wanted[layer] for layer in self._config.feature_layers], dim=-1)
        if self._config.drops_first:
            features = features.view(count, length, -1)[:, 1:].flatten(0, 1)
        return list(self._projector(features.contiguous()).chunk(count))

    def sums(self, images: Sequence[ImageInput]) -> Iterator[SumShape]:
        """As in `VisionEncoder`."""
        length, count = self._side**2 + self._is_clip, len(images)
        for layer in self._layers:
            yield from layer.sums(count * length)
        yield from self._projector.sums(count * (length - self._config.drops_first))

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """[num_images, num_channels, size, size] -> [num_images, length, width]. Pixels past the last whole patch are
        not seen."""
        side, size = self._side, self._config.patch_size
        cropped = pixels[:, :, : side * size, : side * size]
        by_patch = cropped.reshape(*cropped.shape[:2], side, size, side, size).permute(0, 2, 4, 1, 3, 5)
        x = self._patches(by_patch.reshape(len(pixels) * side**2, -1)).view(len(pixels), side**2, -1)
        if self._class is not None:
            x = torch.cat((self._class.expand(len(pixels), 1, -1), x), dim=1)
        x = x + self._positions
        return x if self._first_norm is None else self._first_norm(x)
