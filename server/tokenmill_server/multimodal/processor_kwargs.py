"""What may be said of the model's own processors of images and videos."""

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class ProcessorKwargs:
    """What is said of the model's own processors; None: nothing. Names are those of transformers."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    """Of an image, and of a frame (of all frames together with Qwen3-VL)."""
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    do_sample_frames: bool | None = None
    cap_pixels_per_frame: bool | None = None

    @property
    def states_sampling(self) -> bool:
        """Whether frames are to be chosen as it says."""
        return bool(self.do_sample_frames) or self.fps is not None or self.num_frames is not None

    def over(self, other: "ProcessorKwargs") -> "ProcessorKwargs":
        """Both; where both say something, this counts."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        if self.fps is not None or self.num_frames is not None:
            other = replace(other, fps=None, num_frames=None)
        return replace(other, **{name: value for name, value in said.items() if value is not None})

    @property
    def is_empty(self) -> bool:
        return self == NOTHING_SAID


NOTHING_SAID = ProcessorKwargs()
