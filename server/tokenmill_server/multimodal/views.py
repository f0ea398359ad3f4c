"""An image in the views that LLaVA-OneVision sees it in: the whole, and tiles of it. Pixel for pixel what transformers'
`LlavaOnevisionImageProcessorPil` gives, with numpy and Pillow alone."""

import math

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tokenmill_engine.config.views import ViewsConfig
from tokenmill_server.multimodal.bands import resized

Pixels = NDArray[np.uint8]


def cut_views(image: Image.Image, views: ViewsConfig, resample: int) -> Pixels:
    """uint8 [num_views, view_size, view_size, 3]: the whole, stretched to a square, then the tiles row
    by row, with black beside what keeps its proportions."""
    width, height = image.size
    size, best = views.view_size, views.best_size(height, width)
    inner = _inner_size((height, width), best)
    padded = np.zeros((*best, 3), np.uint8)
    top, left = (best[0] - inner[0]) // 2, (best[1] - inner[1]) // 2
    padded[top : top + inner[0], left : left + inner[1]] = resized(image, inner, resample)
    tiles = padded.reshape(best[0] // size, size, best[1] // size, size, 3).swapaxes(1, 2).reshape(-1, size, size, 3)
    return np.concatenate((resized(image, (size, size), resample)[None], tiles))


def _inner_size(image: tuple[int, int], best: tuple[int, int]) -> tuple[int, int]:
    """The largest (height, width) within `best` of the image's proportions."""
    by_width, by_height = best[1] / image[1], best[0] / image[0]
    if by_width < by_height:
        return min(math.ceil(image[0] * by_width), best[0]), best[1]
    return best[0], min(math.ceil(image[1] * by_height), best[1])
