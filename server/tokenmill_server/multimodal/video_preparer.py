"""Prepares the videos of one model: decodes them, and cuts their frames into what its encoder takes."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.messages import MediaTensor
from tokenmill_server.multimodal.asking import Asking, Find
from tokenmill_server.multimodal.decoding_memory import DecodingMemory
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.given_video import GivenVideo, resize_frames
from tokenmill_server.multimodal.items import PreparedItem, media_tensor
from tokenmill_server.multimodal.retrying import tried_twice
from tokenmill_server.multimodal.settings import ENGINE_BOUNDS, MediaSettings
from tokenmill_server.multimodal.video_memory import VideoShare, with_share
from tokenmill_server.multimodal.video_options import VideoOptions
from tokenmill_server.multimodal.video_process import FramePlan, Frames, VideoFacts, decode_video
from tokenmill_server.multimodal.video_processor import (
    VideoPlan,
    group_key,
    pack_frames,
    plan_video,
    value_table,
    video_key,
)
from tokenmill_server.multimodal.video_reading import VideoReading
from tokenmill_server.multimodal.video_sampling import Sampling
from tokenmill_server.multimodal.wishes import MediaWishes


class VideoPreparer:
    """Used from many threads at a time."""

    def __init__(
        self, media: MediaConfig, options: VideoOptions, settings: MediaSettings, max_item_tokens: int
    ) -> None:
        """`max_item_tokens`: most of a video, or of a group of its frames where those are apart, that the engine
        holds."""
        self._media = media
        self._options = options
        self._settings = settings
        self._max_item_tokens = max_item_tokens
        self._values = media_tensor(value_table(options))

    def options_text(self, wishes: MediaWishes) -> str:
        """All that decides, beside the file, what `prepare` makes of it."""
        sampling = self._sampling(wishes)
        return f"{sampling.reading} {sampling.is_stated} {sampling.options.text()}"

    def prepare(
        self, video: bytes | GivenVideo, wishes: MediaWishes, memory: DecodingMemory, asking: Asking
    ) -> PreparedItem:
        """The video in a file, or of these frames. Takes long: call it in a thread. Files are decoded with some of
        `memory`.

        Raises MediaError for what is no video, goes beyond a limit, or the model does not take; OverloadedError if its
        process is killed, also in a second attempt; and what `asking` does.
        """
        sampling = self._sampling(wishes)
        if isinstance(video, GivenVideo):  # no reader chooses among its frames
            sampling = replace(sampling, reading=VideoReading(-1, -1.0), chosen=video.chosen)
        plans: list[VideoPlan] = []

        def choose(facts: VideoFacts) -> FramePlan:
            plan = plan_video(facts, sampling, self._settings.max_video_frames)
            self._check(plan)
            asking.admit(plan.num_tokens)
            plans.append(plan)
            return plan.frames

        def item(frames: Frames) -> PreparedItem:
            return self._item(plans[-1], frames, sampling, asking.find)

        if isinstance(video, GivenVideo):
            return item(resize_frames(video, self._settings, choose))

        def work(share: VideoShare) -> PreparedItem:
            return item(decode_video(video, self._settings, choose, share, asking.check))

        def attempt() -> PreparedItem:
            return with_share(memory, len(video), self._settings.max_video_pixels, work, asking.check)

        return tried_twice(attempt, "video", asking.check)

    def _item(self, plan: VideoPlan, frames: Frames, sampling: Sampling, find: Find) -> PreparedItem:
        text = sampling.options.text()
        key = video_key(plan, frames, text)
        found = find(key)
        if found is not None:
            return found
        patches = pack_frames(frames.pixels, sampling.options)
        if self._media.frames_apart:
            return self._apart(plan, patches, key, text)
        seconds = None if self._media.tokens_per_second is None else plan.seconds_per_step
        return PreparedItem("video", key, plan.num_tokens, plan.grid, self._tensors(patches), seconds)

    def _apart(self, plan: VideoPlan, patches: NDArray[np.uint8], key: bytes, options: str) -> PreparedItem:
        steps, rows, columns = plan.grid
        grid = (1, rows, columns)
        parts = [
            PreparedItem("video", group_key(group, grid, options), plan.num_tokens // steps, grid, self._tensors(group))
            for group in np.split(patches, steps)
        ]
        return PreparedItem("video", key, plan.num_tokens, plan.grid, {}, parts=tuple(parts), times=plan.timestamps)

    def _tensors(self, patches: NDArray[np.uint8]) -> dict[str, MediaTensor]:
        return {"pixel_values": media_tensor(patches), "values": self._values}

    def _sampling(self, wishes: MediaWishes) -> Sampling:
        return Sampling(
            wishes.reading, self._options.with_kwargs(wishes.kwargs), is_stated=wishes.kwargs.states_sampling
        )

    def _check(self, plan: VideoPlan) -> None:
        """What the engine would refuse is not decoded."""
        num_steps = plan.grid[0]
        largest = plan.num_tokens // num_steps if self._media.frames_apart else plan.num_tokens
        if largest > self._max_item_tokens:
            raise MediaError(
                f"the video takes {largest} tokens at once, and the engine holds {self._max_item_tokens}; send a "
                f"shorter or smaller one, or have fewer of its frames looked at ({ENGINE_BOUNDS})"
            )
        if self._media.tokens_per_second is None:
            return
        length = (num_steps - 1) * plan.seconds_per_step * self._media.tokens_per_second
        if length >= self._media.positions_per_token * plan.num_tokens:
            raise MediaError(
                f"the video is too long for so few of its frames: {plan.seconds_per_step:.1f} s lie between those that "
                "are looked at, more than the model can count; have more of them looked at"
            )
