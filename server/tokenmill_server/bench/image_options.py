"""The flags of the dataset `random-mm`, named as in the known serving benchmark where that has them."""

import argparse
import ast

from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.random_images import ImageShape, SizeRange, parse_sizes
from tokenmill_server.bench.values import checked, positive, ratio

DATASET = "random-mm"

_DEFAULT_SIZES = "256x256,720x1280"


def _buckets(text: str) -> tuple[SizeRange, ...]:
    """`{(HEIGHT, WIDTH, 1): SHARE, ...}`. More than one frame is a video."""
    sizes = []
    for (height, width, num_frames), weight in ast.literal_eval(text).items():
        if weight and num_frames != 1:
            raise ValueError
        if weight:
            (size,) = parse_sizes(f"{int(width)}x{int(height)}")
            sizes.append(SizeRange(size.smallest, size.largest, float(weight)))
    return tuple(sizes)


def _is_mix(sizes: tuple[SizeRange, ...]) -> bool:
    return bool(sizes) and all(0 < size.weight < float("inf") for size in sizes)


sizes = checked(parse_sizes, _is_mix, "sizes such as 256x256,640x480 or 256x256..2048x2048")
buckets = checked(_buckets, _is_mix, "{(HEIGHT, WIDTH, 1): SHARE, ...} of images; videos are not drawn")
share = checked(float, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Defaults are None: what is given for another dataset is an error."""
    group = parser.add_argument_group(f"images (--dataset-name {DATASET})")
    add = group.add_argument
    add("--random-mm-base-items-per-request", type=positive, metavar="N", help="images of a request; default: 1")
    add("--random-mm-num-mm-items-range-ratio", type=ratio, help="their number varies evenly by this share; default: 0")
    add(
        "--random-mm-sizes",
        type=sizes,
        metavar="WxH,...",
        help=f"each as often; WxH..WxH is everything between two. Default: {_DEFAULT_SIZES}",
    )
    add("--random-mm-bucket-config", type=buckets, metavar="DICT", help="instead: {(HEIGHT, WIDTH, 1): SHARE, ...}")
    add("--random-mm-repeat-share", type=share, metavar="SHARE", help="images that were sent before; default: 0")
    add("--random-mm-format", choices=["jpeg", "png"], help="default: jpeg")


def image_shape(options: argparse.Namespace) -> ImageShape | None:
    """None: a workload without images. Raises ConfigError."""
    given = {
        name: value for name, value in vars(options).items() if name.startswith("random_mm_") and value is not None
    }
    if options.dataset_name != DATASET:
        if given:
            flag = "--" + next(iter(given)).replace("_", "-")
            raise ConfigError(f"{flag} needs --dataset-name {DATASET}")
        return None
    if {"random_mm_sizes", "random_mm_bucket_config"} <= given.keys():
        raise ConfigError("--random-mm-sizes and --random-mm-bucket-config say the same; leave one out")
    drawn = given.get("random_mm_sizes") or given.get("random_mm_bucket_config") or parse_sizes(_DEFAULT_SIZES)
    return ImageShape(
        sizes=drawn,
        num_per_request=given.get("random_mm_base_items_per_request", 1),
        range_ratio=given.get("random_mm_num_mm_items_range_ratio", 0.0),
        repeat_share=given.get("random_mm_repeat_share", 0.0),
        format=given.get("random_mm_format", "jpeg"),
    )
