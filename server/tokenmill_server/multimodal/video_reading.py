"""How the reader of videos chooses frames."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VideoReading:
    """Evenly spread frames: the fewer of the two. Names and defaults are vLLM's."""

    num_frames: int = 32
    """Most frames of a video; -1: all."""
    fps: float = -1.0
    """Most frames of a second; -1: all."""
