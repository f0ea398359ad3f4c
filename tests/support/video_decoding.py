"""Videos decoded as an API server does it, with memory for one of the largest size."""

from collections.abc import Callable

from tokenmill_server.multimodal.asking import Check, always
from tokenmill_server.multimodal.decoding_memory import DecodingMemory
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.video_memory import VideoShare, with_share
from tokenmill_server.multimodal.video_process import FramePlan, Frames, VideoFacts, decode_video

SETTINGS = MediaSettings(video_decode_timeout_s=300.0)


def decode(
    data: bytes,
    choose: Callable[[VideoFacts], FramePlan],
    check: Check = always,
    settings: MediaSettings = SETTINGS,
) -> Frames:
    """What `choose` wants of the video in the file `data`."""

    def work(share: VideoShare) -> Frames:
        return decode_video(data, settings, choose, share, check)

    return with_share(DecodingMemory(settings.memory_bytes), len(data), settings.max_video_pixels, work, check)
