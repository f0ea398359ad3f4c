"""What must hold of the media of a request. A front end has prepared them; what is wrong with them would otherwise fail
in the encoder or the scheduler, and take other requests with it. Torch-free."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.media import MediaConfig, VisionConfig
from tokenmill_engine.config.views import ViewsConfig
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import MediaItem, MediaTensor

_KEY_BYTES = 32
_TENSORS = frozenset({"pixel_values", "values"})


def check_media(
    items: Sequence[MediaItem], prompt: NDArray[np.int32], config: MediaConfig | None, max_item_tokens: int
) -> None:
    """Raises InvalidRequestError if the model does not take `items`, or not at these places of `prompt` [num_tokens],
    or one is larger than `max_item_tokens`."""
    if not items:
        return
    if config is None:
        raise _error("this model reads text only; it takes no images")
    end = 0
    for index, item in enumerate(items):
        name = f"{item.kind} {index}"
        token_id = _placeholder(name, item, config)
        if len(item.key) != _KEY_BYTES:
            raise _error(f"{name}: its key has {len(item.key)} bytes, not {_KEY_BYTES}")
        start, end = _checked_place(name, item, end, len(prompt))
        if not (prompt[start:end] == token_id).all():
            raise _error(f"{name}: tokens {start}..{end - 1} of the prompt are not all its placeholder")
        if item.num_tokens > max_item_tokens:
            raise _error(
                f"{name} takes {item.num_tokens} tokens; this engine holds {max_item_tokens} of one image or video. "
                f"Send {'a smaller image' if item.kind == 'image' else 'a shorter or smaller video'}"
            )
        _check_tensors(name, item, config)
        _check_seconds(name, item, config)


def _placeholder(name: str, item: MediaItem, config: MediaConfig) -> int:
    """The token that stands for its rows."""
    if item.kind == "image":
        return config.image_token_id
    if item.kind != "video" or not config.takes_video or config.video_token_id is None:
        raise _error(f"{name}: this model takes {'images and videos' if config.takes_video else 'images'} only")
    return config.video_token_id


def _checked_place(name: str, item: MediaItem, last_end: int, num_prompt: int) -> tuple[int, int]:
    start, end = item.offset, item.offset + item.num_tokens
    if item.num_tokens < 1:
        raise _error(f"{name}: it takes {item.num_tokens} tokens")
    if start < last_end:
        raise _error(f"{name}: it begins at token {start}, where the one before it has not ended, or the prompt begun")
    if end > num_prompt:
        raise _error(f"{name}: it ends at token {end}; the prompt has {num_prompt}")
    return start, end


def _check_tensors(name: str, item: MediaItem, config: MediaConfig) -> None:
    """Its pixels are what the encoder takes, and give as many rows as it has placeholders."""
    vision = config.vision
    shape: tuple[int, ...]
    if item.tensors.keys() != _TENSORS:
        raise _error(f"{name}: it has the tensors {sorted(item.tensors)}, not {sorted(_TENSORS)}")
    if config.views is not None:
        shape, num_rows = _shape_of_views(name, item, vision, config.views)
    elif config.kind == "llava":
        if vision.image_size is None or item.grid is not None:
            raise _error(f"{name}: this model takes images of one size; they have no grid")
        shape = (vision.num_channels, vision.image_size, vision.image_size)
        num_rows = vision.tokens_per_image or 0
    else:
        merge = vision.spatial_merge_size
        if item.grid is None or min(item.grid) < 1 or item.grid[1] % merge or item.grid[2] % merge:
            raise _error(f"{name}: its grid is {item.grid}; height and width must be multiples of {merge}")
        if item.kind == "image" and item.grid[0] != 1:
            raise _error(f"{name}: its grid is {item.grid}; an image has one patch in time")
        if item.kind == "video" and config.frames_apart and item.grid[0] != 1:
            raise _error(f"{name}: its grid is {item.grid}; frames with text between them are items of their own")
        patch_dim = vision.image_patch_dim if item.kind == "image" else vision.patch_dim
        shape = (math.prod(item.grid), patch_dim)
        num_rows = shape[0] // merge**2
    if num_rows != item.num_tokens:
        raise _error(f"{name}: it has {item.num_tokens} placeholders and becomes {num_rows} rows")
    is_elsewhere = item.shared is not None
    _check_tensor(f"{name}: pixel_values", item.tensors["pixel_values"], "uint8", shape, is_elsewhere)
    _check_tensor(f"{name}: values", item.tensors["values"], "float32", (vision.num_channels, 256), is_elsewhere)


def _shape_of_views(
    name: str, item: MediaItem, vision: VisionConfig, views: ViewsConfig
) -> tuple[tuple[int, ...], int]:
    """Of its pixels, and how many rows they become."""
    if item.grid is None or min(item.grid) < 1:
        raise _error(f"{name}: its grid is {item.grid}; it must have views, height and width")
    num_views, height, width = item.grid
    if item.kind == "video":
        if (height, width) != (views.view_size, views.view_size):
            raise _error(f"{name}: its frames have {height} x {width} pixels, not {views.view_size} on a side")
        num_rows = views.num_video_rows(num_views)
        return (num_views, vision.num_channels, height, width), num_rows
    if num_views not in (1, 1 + views.num_tiles(height, width)):
        raise _error(f"{name}: {num_views} views are not what {height} x {width} pixels are seen in")
    shape = (num_views, vision.num_channels, views.view_size, views.view_size)
    return shape, views.num_rows(num_views, height, width)


def _check_seconds(name: str, item: MediaItem, config: MediaConfig) -> None:
    """Of a video of a model that is told the time, and of nothing else; it ends within the positions that there are."""
    seconds = item.seconds_per_step
    if item.kind != "video" or config.tokens_per_second is None or item.grid is None:
        if seconds is not None:
            raise _error(f"{name}: nothing asks for its seconds from patch to patch, and they are {seconds}")
        return
    if seconds is None or not seconds > 0:
        raise _error(f"{name}: its seconds from patch to patch must be above 0, not {seconds}")
    length = (item.grid[0] - 1) * seconds * config.tokens_per_second
    if not length < config.positions_per_token * item.num_tokens:
        raise _error(
            f"{name}: it is too long for its {item.num_tokens} tokens. Send a shorter one, or more frames of it"
        )


def _check_tensor(name: str, tensor: MediaTensor, dtype: str, shape: tuple[int, ...], is_elsewhere: bool) -> None:
    """`is_elsewhere`: its bytes are in shared memory."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise _error(f"{name} are {tensor.dtype} {tensor.shape}, not {dtype} {shape}")
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if len(tensor.data) != num_bytes and not (is_elsewhere and len(tensor.data) == 0):
        raise _error(f"{name} have {len(tensor.data)} bytes, not {num_bytes}")


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="media")
