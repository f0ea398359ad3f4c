"""A dense decoder with a vision encoder in front of it: rows of the encoder's output take the place of the embeddings
of placeholder tokens, and positions may have three dimensions."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tokenmill_engine.attention.backend import AttentionBackend
from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.config.parallel import check_first_stage
from tokenmill_engine.config.stages import Stage
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.layers.placement import Placement, Target
from tokenmill_engine.models.dense_decoder import DenseDecoder, KVCaches, Stream
from tokenmill_engine.models.vision.encoder import ImageInput, VisionEncoder
from tokenmill_engine.models.vision.making import make_encoder
from tokenmill_engine.models.vision.pixels import pixel_values
from tokenmill_engine.models.vision.spelling import decoder_name, own_name


class MediaDecoder(DenseDecoder):
    """LLaVA, LLaVA-OneVision and the dense Qwen-VL models. The workers of the first stage have the encoder, together or
    each all of it as `ModelConfig.encoder_mode` says; without `ModelConfig.media` nobody has."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        attention: AttentionBackend | None = None,
        group: Group = ALONE,
        stage: Stage | None = None,
    ) -> None:
        """As in `DenseDecoder`."""
        super().__init__(config, device, attention, group, stage)
        self._media = media = config.media
        self._vision = media.vision if media is not None else None
        self._turns_with = _dimensions(media, device) if media is not None else None
        if media is not None and self.stage.is_first:
            check_first_stage(media.vision, len(self.layers))
        group = group if config.encoder_mode == "weights" else ALONE
        self.encoder = self._build(device, group) if self.stage.is_first else None

    @property
    def row_size(self) -> int:
        """Values of a row of an encoder's output: `MediaRows.rows`."""
        return self._vision.row_size if self._vision is not None else self.architecture.hidden_size

    def targets(self) -> dict[str, Target]:
        """As in `DenseDecoder`, and those of the encoder."""
        encoder = dict(self.encoder.targets()) if self.encoder is not None else {}
        return super().targets() | encoder

    def parameter_names(self) -> list[str]:
        """As in `DenseDecoder`, and those of the encoder."""
        shadow = self._build(torch.device("meta"), ALONE)
        names = [name for name, _ in shadow.targets()] if shadow is not None else []
        return super().parameter_names() + names

    def own_name(self, name: str) -> str | None:
        """As in `DenseDecoder`."""
        if self._vision is None:
            return decoder_name(name)
        return own_name(name, max(self._vision.feature_layers, default=None))

    def finalize(self, allow_fused: bool = True) -> None:
        """As in `DenseDecoder`."""
        super().finalize(allow_fused)
        if self.encoder is not None:
            self.encoder.finalize()

    @torch.inference_mode()
    def encode(self, images: Sequence[ImageInput]) -> list[torch.Tensor]:
        """What takes the place of each image's placeholders, [num_tokens, row_size] of the model's dtype, all images in
        one batch. Of workers that have the encoder together, all make the same calls.

        Raises ValueError for pixels that the encoder does not take, RuntimeError where there is no encoder.
        """
        if not images:
            return []
        if self.encoder is None:
            raise RuntimeError("there is no encoder here")
        return self.encoder.encode([self.ready(image) for image in images])

    def ready(self, image: ImageInput) -> ImageInput:
        """The same with float32 pixels on the model's device, as the encoder takes them."""
        if image.values is None or self._vision is None:
            return image
        pixels, values = (each.to(self.device) for each in (image.pixel_values, image.values))
        return replace(image, pixel_values=pixel_values(pixels, values, self._vision), values=None)

    def forward(
        self,
        batch: ForwardBatch,
        kv_caches: KVCaches,
        output_rows: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        incoming: Stream | None = None,
    ) -> torch.Tensor:
        """As in `DenseDecoder`."""
        return super().forward(self._begin(batch), kv_caches, output_rows, out, incoming)

    def run_layers(
        self,
        batch: ForwardBatch,
        kv_caches: KVCaches,
        incoming: Stream | None,
        output_rows: torch.Tensor | None = None,
    ) -> Stream:
        """As in `DenseDecoder`."""
        return super().run_layers(self._begin(batch), kv_caches, incoming, output_rows)

    def _begin(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch with embeddings and a rotary table of its own where it needs them. Once is enough."""
        if batch.positions.dim() == 2:
            cos_sin = self._turned(batch.positions)
            positions = torch.arange(cos_sin.shape[0], dtype=torch.int32, device=self.device)
            batch = replace(batch, positions=positions, cos_sin=cos_sin)
        if batch.media is not None and batch.embeddings is None and self.stage.is_first:
            embeddings = self.embed_tokens(batch.input_ids)
            rows, hidden_size = batch.media.rows, embeddings.shape[1]
            embeddings.index_copy_(0, batch.media.tokens, rows[:, :hidden_size])
            batch = replace(batch, embeddings=embeddings)
            if rows.shape[1] > hidden_size:
                batch.deepstack = rows[:, hidden_size:]
        return batch

    def _turned(self, positions: torch.Tensor) -> torch.Tensor:
        """int32 [3, num_tokens] -> float32 [num_tokens, rotary_dim]: each frequency at its own position, cosines in
        front of sines."""
        if self._turns_with is None:
            raise ValueError("the model has no positions in three dimensions")
        return self.cos_sin.gather(0, positions.index_select(0, self._turns_with).T.long())

    def _build(self, device: torch.device, group: Group) -> VisionEncoder | None:
        return None if self._media is None else make_encoder(self._media, Placement(self.dtype, device, group))


def _dimensions(media: MediaConfig, device: torch.device) -> torch.Tensor | None:
    """Of M-RoPE int32 [rotary_dim], for each cosine and sine which position it is of: 0 time, 1 height, 2 width."""
    if media.mrope_section is None:
        return None
    if media.mrope_interleaved:
        dimensions = [0] * sum(media.mrope_section)
        for dimension in (1, 2):
            places = range(dimension, min(3 * media.mrope_section[dimension], len(dimensions)), 3)
            for place in places:
                dimensions[place] = dimension
    else:
        dimensions = [index for index, count in enumerate(media.mrope_section) for _ in range(count)]
    return torch.tensor(dimensions * 2, dtype=torch.int32, device=device)
