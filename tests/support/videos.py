"""Videos for tests, encoded here."""

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray

from tests.support.pictures import data_url

Frame = NDArray[np.uint8]


def moving(num_frames: int, height: int, width: int, seed: int = 0) -> list[Frame]:
    """Smooth pictures, each different from the others: what encoders keep."""
    rows, columns = np.mgrid[0:height, 0:width]
    frames = []
    for index in range(num_frames):
        waves = [
            127 + 120 * np.sin((rows * (1 + channel) + columns * 2) / 17 + index * (0.3 + 0.1 * channel) + seed)
            for channel in range(3)
        ]
        frames.append(np.stack(waves, axis=-1).astype(np.uint8))
    return frames


def video_file(
    frames: list[Frame], kind: str = "mp4", codec: str = "libx264", rate: float = 10, **options: str
) -> bytes:
    """The frames as a file, `rate` a second."""
    stream = io.BytesIO()
    per_second = Fraction(rate).limit_denominator(1001)
    with av.open(stream, "w", format=kind) as container:
        video: Any = container.add_stream(codec, rate=per_second, options=options)
        video.height, video.width = frames[0].shape[:2]
        video.pix_fmt = "yuvj420p" if codec == "mjpeg" else "rgb8" if codec == "gif" else "yuv420p"
        video.thread_count = 1
        for pixels in frames:
            for packet in video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in video.encode():
            container.mux(packet)
    return stream.getvalue()


def decoded(data: bytes) -> list[Frame]:
    """All frames of a file, one after the other, as transformers' reader makes them."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def video_url(data: bytes, kind: str = "video/mp4") -> str:
    return data_url(data, kind)
