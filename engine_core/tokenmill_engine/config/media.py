"""What a model needs to know to look at images, independent of the file format it came from. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from tokenmill_engine.config.views import ViewsConfig

VisionKind = Literal["clip", "siglip", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
MediaKind = Literal["llava", "llava_onevision", "qwen2_vl"]
EncoderMode = Literal["weights", "data"]
"""`weights`: each worker has a part of the encoder, and all compute every image together; `data`: each has all of the
encoder, and the images of a step are split over them."""

_POSITIONS_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Shape of a vision encoder, from pixels to rows as wide as the decoder's hidden states."""

    kind: VisionKind
    """`clip` and `siglip`: towers that see images of one size, with a projector of two matrices behind them (LLaVA).
    `qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`: encoders of images of any size, which merge neighbouring patches."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    """Pixels on a side."""
    output_size: int
    """Width of the rows that the encoder gives: the decoder's hidden size."""
    activation: str
    """In the feed-forward blocks, by the names of `config.json`: `gelu`, `quick_gelu`, `gelu_pytorch_tanh`, `silu`."""
    norm_eps: float = 1e-6
    num_channels: int = 3
    image_size: int | None = None
    """Pixels on a side of every image; None: images of any size."""
    temporal_patch_size: int = 1
    """Frames in a patch; an image is repeated that often."""
    spatial_merge_size: int = 1
    """Patches on a side of the square that becomes one row of the output."""
    window_size: int | None = None
    """Pixels on a side of the windows within which most layers attend; None: all attend to the whole image."""
    full_attention_layers: tuple[int, ...] = ()
    """With windows: the layers that attend to the whole image."""
    feature_layers: tuple[int, ...] = ()
    """Towers: the hidden states that the projector sees side by side; 0 are those in front of the first layer, i those
    behind the i-th."""
    positions_side: int | None = None
    """Learned positions on a side of the square that is stretched over every image; None: there are none."""
    deepstack_layers: tuple[int, ...] = ()
    """Ascending: layers behind which states are merged for the first layers of the decoder (arXiv:2406.04334)."""
    drops_first: bool = True
    """Towers: the first state of each image, a class token in CLIP, is left out."""
    projector_activation: str = "gelu"
    projector_bias: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def image_patch_dim(self) -> int:
        """Pixels of a patch of an image, which its frames repeat."""
        return self.num_channels * self.patch_size**2

    @property
    def row_size(self) -> int:
        """Values that the encoder gives for a placeholder: its embedding, and what is added behind layers."""
        return self.output_size * (1 + len(self.deepstack_layers))

    @property
    def num_parameters(self) -> int:
        """Weights of the matrices that are used."""
        width, is_tower = self.hidden_size, self.kind in ("clip", "siglip")
        num_layers = max(self.feature_layers, default=0) if is_tower else self.num_layers
        layer = 4 * width**2 + (3 if self.kind == "qwen2_5_vl" else 2) * width * self.intermediate_size
        merged = width * (len(self.feature_layers) if is_tower else self.spatial_merge_size**2)
        inner = self.output_size if is_tower else merged
        num_mergers = 1 + len(self.deepstack_layers)
        return width * self.patch_dim + num_layers * layer + num_mergers * inner * (merged + self.output_size)

    @property
    def tokens_per_image(self) -> int | None:
        """Rows that each image becomes; None: as many as it has merged patches."""
        if self.image_size is None:
            return None
        num_patches = (self.image_size // self.patch_size) ** 2
        has_class = self.kind == "clip"
        return num_patches + has_class - self.drops_first


@dataclass(frozen=True, slots=True)
class MediaConfig:
    """How a prompt carries images. Each image is a run of `image_token_id` in it, one for every row that the encoder
    gives for it."""

    kind: MediaKind
    """How images are prepared: `llava`, "pixel_values" [3, image_size, image_size]; `llava_onevision`, [num_views, 3,
    image_size, image_size] and a grid of (num_views, height, width), pixels of the image; `qwen2_vl`, "pixel_values"
    [num_patches, image_patch_dim] and a grid of (time, height, width) patches; those to be merged come one after
    another."""
    image_token_id: int
    vision: VisionConfig
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    """Qwen2-VL: what stands in front of an image and behind it."""
    takes_video: bool = False
    """Whether there may be videos too: runs of `video_token_id`."""
    tokens_per_second: float | None = None
    """Qwen2.5-VL: positions in time that a second of a video takes; None: every step in time takes one."""
    mrope_section: tuple[int, int, int] | None = None
    """M-RoPE (arXiv:2409.12191): how many of the rotary_dim / 2 frequencies turn with time, height and width; None: the
    position in the text alone."""
    mrope_interleaved: bool = False
    """The frequencies of height and width take turns with those of time; else they come one section after another."""
    views: ViewsConfig | None = None
    """LLaVA-OneVision: how images are seen in several views."""
    frames_apart: bool = False
    """Text stands between the frames of a video: every group of frames that becomes one is an item of its own."""

    @property
    def positions_per_token(self) -> int:
        """No item takes positions beyond that many times its tokens: a video takes as many as it is long."""
        return 1 if self.tokens_per_second is None else _POSITIONS_PER_TOKEN
