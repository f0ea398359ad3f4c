"""What an API server may fetch and decode. Knows nothing of flags, which fill it in, nor of models."""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.video_reading import VideoReading

MIB = 2**20
GIB = 2**30


MOST_ITEMS = 999


ENGINE_BOUNDS = "--max-num-encoder-input-tokens and --encoder-cache-size bound it"
"""What messages add that tell of an image or a video that is too large for the engine."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """How many of each kind a request may have."""

    images: int = MOST_ITEMS
    videos: int = MOST_ITEMS


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """Limits that hold for each API server, and for `LLM`."""

    loading_threads: int = 8
    """Threads that decode and prepare media."""
    image_processes: int | None = None
    """Processes that decode and prepare large images, at most; None: as many as there are threads for it, and cores. 0:
    threads do it."""
    limits: PromptLimits = field(default_factory=PromptLimits)
    """Of what the model takes; of a model of text alone without a meaning."""
    fetch_timeout_s: float = 5.0
    """For an image at an http(s) address, redirects included."""
    max_bytes: int = 256 * MIB
    """Of encoded media: of each, and of all of a request together."""
    max_pixels: int = 178_956_970
    """Of an image as it is stored, before it is decoded."""
    video_fetch_timeout_s: float = 30.0
    max_video_pixels: int = 8_912_896
    """Of a frame as it is stored: 4096 x 2176."""
    max_video_frames: int = 768
    """Of a video that are looked at, after sampling."""
    max_video_duration_s: float = 3600.0
    video_decode_timeout_s: float = 60.0
    """For decoding the frames that are looked at."""
    video_reading: VideoReading = field(default_factory=VideoReading)
    processor_kwargs: ProcessorKwargs = field(default_factory=ProcessorKwargs)
    """What holds where a request says nothing."""
    trusts_requests: bool = False
    """Whether requests may say something else."""
    memory_bytes: int = 4 * GIB
    """Memory that the images and videos which are being decoded and prepared may take together, as estimated. One that
    takes more is refused. And what the media of open requests may take."""
    refuses_when_full: bool = True
    """Whether requests are refused when other open ones have all of that. A program that hands all of its prompts over
    at once waits before it begins more."""
    allow_redirects: bool = True
    allowed_domains: tuple[str, ...] = ()
    """Names of hosts, in lower case: media come from these alone, and whatever address they have. Empty: from every
    host with a public address."""
    local_path: str | None = None
    """Folder whose files may be named by file: addresses; None: none may."""
    cache_gb: float = 4.0
    """GiB of each cache of prepared media; 0: nothing is remembered."""
    cache_type: Literal["lru", "shm"] = "lru"
    max_shared_object_mb: int = 128
    """MiB of an item that is put into shared memory; a larger one travels with its request."""
