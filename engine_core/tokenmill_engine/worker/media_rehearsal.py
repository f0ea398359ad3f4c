"""Made-up images for the start: those whose encoding takes every kernel of a GPU, and the one that takes the most
memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.messages import MediaTensor
from tokenmill_engine.outputs import EncoderInput, MediaPlace, PlaceholderRows, StepMedia, StepPlan
from tokenmill_engine.worker.encoder import BATCH_TOKENS
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan


def black_image(media: MediaConfig, num_tokens: int, entry: int = 0) -> EncoderInput:
    """An image of `num_tokens` rows, or of the largest size below that; if all are larger, of the smallest."""
    vision, grid = media.vision, None
    shape: tuple[int, ...]
    if media.views is not None:
        views = media.views
        grids = [(1, *views.sizes[0]), *((1 + views.num_tiles(*size), *size) for size in views.sizes)]
        grid = max(grids, key=lambda grid: _nearness(views.num_rows(*grid), num_tokens))
        num_tokens, shape = views.num_rows(*grid), (grid[0], vision.num_channels, views.view_size, views.view_size)
    elif vision.tokens_per_image is not None:
        size = vision.image_size or 0
        num_tokens, shape = vision.tokens_per_image, (vision.num_channels, size, size)
    else:
        rows, merge = math.isqrt(num_tokens), vision.spatial_merge_size
        grid = (1, rows * merge, num_tokens // rows * merge)
        num_tokens, shape = rows * (num_tokens // rows), (math.prod(grid), vision.image_patch_dim)
    pixels = MediaTensor("uint8", shape, bytes(math.prod(shape)))
    values = MediaTensor("float32", (vision.num_channels, 256), bytes(4 * vision.num_channels * 256))
    return EncoderInput(entry, "image", num_tokens, grid, {"pixel_values": pixels, "values": values})


def _nearness(num_rows: int, wanted: int) -> int:
    """The larger the better: the most below `wanted` comes first, then the least above."""
    return num_rows if num_rows <= wanted else -num_rows


def image_plan(image: EncoderInput, num_tokens: int, num_groups: int, block_size: int) -> StepPlan:
    """A request whose prompt begins with `image`, and as many of its tokens."""
    plan = rehearsal_plan(1, num_tokens, num_groups, block_size, GREEDY)
    start = replace(plan.starts[0], media=(MediaPlace(0, image.num_tokens, image.grid),))
    rows = PlaceholderRows(row=0, start=0, count=min(num_tokens, image.num_tokens), entry=image.entry, first=0)
    return replace(plan, starts=[start], media=StepMedia([], [image], [rows]))


@dataclass(frozen=True, slots=True)
class MediaRehearsal:
    """What an engine that takes images rehearses."""

    config: EngineConfig
    media: MediaConfig
    num_groups: int
    rank: int = 0
    """Of the workers that share the encoding of images: each is to encode what it rehearses by itself."""

    @property
    def _largest_tokens(self) -> int:
        return min(self.config.scheduler.max_item_tokens, self.config.model.max_model_len)

    def batches(self, row_counts: Sequence[int]) -> list[list[EncoderInput]]:
        """Images to encode together, such that the encoder multiplies matrices with about each of `row_counts` rows,
        patches or merged ones: one image of a fitting size, or several where all are of one size."""
        vision = self.media.vision
        if vision.tokens_per_image is None:
            patches = vision.spatial_merge_size**2
            sizes = {size for count in row_counts for size in (count, count // patches)}
            return [[black_image(self.media, size)] for size in sorted(sizes) if 0 < size <= self._largest_tokens]
        # Some matrices see a state more or less of each image than there are rows in the end.
        num_rows = range(max(1, vision.tokens_per_image - 1), vision.tokens_per_image + 2)
        counts = {max(1, count // rows) for count in row_counts for rows in num_rows}
        return [[black_image(self.media, 1, entry) for entry in range(count)] for count in sorted(counts)]

    def step(self) -> StepPlan:
        """A step with an image, as small as one can be."""
        return self._plan(black_image(self.media, 1, self.rank), 1)

    def largest(self) -> StepPlan:
        """The step with an image that needs the most memory."""
        image = black_image(self.media, self._largest_tokens, self.rank)
        plan = self._plan(image, self.config.scheduler.max_num_batched_tokens)
        # Of one size several are encoded at once, as they may be in any step, for one request or several.
        scheduler, model = self.config.scheduler, self.config.model
        num_shares = self.config.parallel.tensor_parallel_size if model.encoder_mode == "data" else 1
        num_at_once = max(1, BATCH_TOKENS // image.num_tokens) * num_shares
        num_in_step = min(scheduler.max_num_encoder_tokens, scheduler.encoder_cache_tokens) // image.num_tokens
        num_images = max(1, min(num_at_once, num_in_step))
        images = [replace(image, entry=self.rank + number) for number in range(num_images)]
        return replace(plan, media=StepMedia([], images, plan.media.rows if plan.media is not None else []))

    def _plan(self, image: EncoderInput, num_tokens: int) -> StepPlan:
        """At least two tokens, so that it is no decode."""
        limit = min(self.config.scheduler.max_num_batched_tokens, self.config.model.max_model_len)
        return image_plan(image, min(max(num_tokens, 2), limit), self.num_groups, self.config.cache.block_size)
