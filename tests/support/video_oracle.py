"""Transformers' video processors as oracles, as far as they run without torchvision, which is not installed here since
nothing but these would need it: everything except the resizing itself, which torchvision leaves to torch."""

import importlib
import sys
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.image_processing_backends import TorchvisionBackend
from transformers.video_utils import VideoMetadata

from tokenmill_server.multimodal.video_options import VideoOptions
from tokenmill_server.multimodal.video_process import VideoFacts

_ABSENT = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional")


@cache
def module_of(method: str) -> Any:
    """transformers' module of the processor. One of them wants a module of torchvision's to be there, for types."""
    name = f"transformers.models.{method}.video_processing_{method}"
    if method == "qwen3_vl":
        return importlib.import_module(name)
    sys.modules.update({each: ModuleType(each) for each in _ABSENT})
    try:
        return importlib.import_module(name)
    finally:
        for each in _ABSENT:
            del sys.modules[each]


def class_of(method: str) -> Any:
    return module_of(method).__dict__["Qwen2VLVideoProcessor" if method == "qwen2_vl" else "Qwen3VLVideoProcessor"]


def sampled(facts: VideoFacts, options: VideoOptions) -> list[int]:
    """The frames that the processor chooses, where it chooses. Raises what it raises."""
    processor = SimpleNamespace(
        num_frames=None,
        fps=None,
        min_frames=options.min_frames,
        max_frames=options.max_frames,
        temporal_patch_size=options.temporal_patch_size,
    )
    metadata = VideoMetadata(total_num_frames=facts.num_frames, fps=facts.fps)
    choose = class_of(options.method).sample_frames
    return list(map(int, choose(processor, metadata, num_frames=options.num_frames, fps=options.fps)))


def resized_size(height: int, width: int, num_frames: int, options: VideoOptions) -> tuple[int, int]:
    """(height, width) without a cap."""
    limits = {"factor": options.factor, "min_pixels": options.min_pixels, "max_pixels": options.max_pixels}
    smart_resize = module_of(options.method).smart_resize
    if options.method == "qwen2_vl":
        return smart_resize(height, width, **limits)  # type: ignore[no-any-return]
    return smart_resize(num_frames, height, width, options.temporal_patch_size, **limits)  # type: ignore[no-any-return]


def normalized(frames: NDArray[np.uint8], options: VideoOptions) -> torch.Tensor:
    """[num_frames, 3, height, width] of frames [num_frames, height, width, 3]."""
    mean, std, _ = TorchvisionBackend._fuse_mean_std_and_rescale_factor(
        None, True, options.mean, options.std, True, options.rescale_factor
    )
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    values: torch.Tensor = (video.to(torch.float32) - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    return values


def patches(frames: NDArray[np.uint8], options: VideoOptions) -> NDArray[np.float32]:
    """[num_patches, values], normalized, of frames [num_frames, height, width, 3] in their final size."""
    values = normalized(frames, options)[None]
    patchify = class_of(options.method).patchify
    flat, *_ = patchify(None, values, options.patch_size, options.merge_size, options.temporal_patch_size)
    return flat[0].numpy()  # type: ignore[no-any-return]


def resized(frames: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """As torchvision resizes bytes on a CPU."""
    video = torch.from_numpy(frames).permute(0, 3, 1, 2)
    result = torch.nn.functional.interpolate(video, size=(height, width), mode="bicubic", antialias=True)
    return result.permute(0, 2, 3, 1).numpy()
