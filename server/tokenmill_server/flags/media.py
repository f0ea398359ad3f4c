"""The rows of the flag table about images and videos."""

import math

from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_server.flags.flag import Arity, EnvAlias, Flag, Group
from tokenmill_server.flags.media_limits import prompt_limits
from tokenmill_server.flags.parsers import boolean, integer, number, one_of, path_text, text_list
from tokenmill_server.multimodal.settings import MIB, MediaSettings

_MAX_THREADS = 1024
_MAX_OBJECT_MB = 1 << 20
_MAX_CACHE_GB = 1 << 20
_DEFAULTS = MediaSettings()
_ENCODER = SchedulerConfig()


def domain_list(value: object) -> tuple[str, ...]:
    """Names of hosts: no addresses of pages, no ports."""
    wanted = "names of hosts such as images.example.com, without https:// and without a port"
    names = text_list(value.split(",") if isinstance(value, str) else value)
    domains = []
    for name in names:
        try:
            host = name.strip().strip("[]").rstrip(".")
            domain = host if ":" in host else host.encode("idna").decode("ascii")
        except UnicodeError:
            raise ValueError(wanted) from None
        if not domain or set(domain) & set("/@*?# ") or ("." in domain and ":" in domain and "[" not in name):
            raise ValueError(wanted)
        domains.append(domain.lower())
    return tuple(dict.fromkeys(domains))


MEDIA = (
    Flag(
        "mm-processor-cache-gb",
        Group.MULTIMODAL,
        number(0, _MAX_CACHE_GB),
        _DEFAULTS.cache_gb,
        "GiB of each cache of prepared images and videos, which are prepared and sent once while they are in it: one "
        "for an API server with one engine core, else one in each API server; 0: none",
        "media.cache_gb",
        metavar="GIB",
    ),
    Flag(
        "mm-processor-cache-type",
        Group.MULTIMODAL,
        one_of("lru", "shm"),
        _DEFAULTS.cache_type,
        "Where these caches are: in processes (lru), or one of each API server in memory that the workers of engine "
        "cores on the same machine read (shm). Both let go of what was not used for longest",
        "media.cache_type",
        metavar="lru|shm",
    ),
    Flag(
        "mm-shm-cache-max-object-size-mb",
        Group.MULTIMODAL,
        integer(1, _MAX_OBJECT_MB),
        _DEFAULTS.max_shared_object_mb,
        "MiB of the largest image or video that --mm-processor-cache-type shm keeps; larger ones travel with their "
        "requests",
        "media.max_shared_object_mb",
        metavar="MIB",
    ),
    Flag(
        "limit-mm-per-prompt",
        Group.MULTIMODAL,
        prompt_limits,
        None,
        'Most images and videos in a request, as JSON: {"image": 4, "video": 1}; 0 for none. Default: 999 each',
        "media.limits",
        metavar="JSON",
    ),
    Flag(
        "language-model-only",
        Group.MULTIMODAL,
        boolean,
        False,
        "Take text alone: the model's encoder of images is not loaded. So does --limit-mm-per-prompt image=0,video=0",
        "model.media",
        arity=Arity.SWITCH,
    ),
    Flag(
        "mm-encoder-tp-mode",
        Group.MULTIMODAL,
        one_of("weights", "data"),
        "weights",
        "How the workers of --tensor-parallel-size share the encoder of images and videos: weights (each has a part of "
        "it, and all compute every image together) or data (each has all of it, and images are split over them)",
        "model.encoder_mode",
        metavar="weights|data",
    ),
    Flag(
        "disable-chunked-mm-input",
        Group.MULTIMODAL,
        boolean,
        False,
        "Compute the placeholders of an image or a video in one step, never in chunks; those of more than "
        "--max-num-batched-tokens are refused then",
        "scheduler.disable_chunked_mm_input",
        arity=Arity.SWITCH,
    ),
    Flag(
        "max-num-encoder-input-tokens",
        Group.MULTIMODAL,
        integer(1),
        _ENCODER.max_num_encoder_tokens,
        "Most tokens of an image or a video, and of all that are encoded in one step; larger ones are refused. Beside "
        "running streams a step encodes one, or several that have no more tokens than it may compute",
        "scheduler.max_num_encoder_tokens",
        metavar="TOKENS",
    ),
    Flag(
        "encoder-cache-size",
        Group.MULTIMODAL,
        integer(1),
        _ENCODER.encoder_cache_tokens,
        "Tokens of encoded images and videos that are kept for later steps and other requests; none has more",
        "scheduler.encoder_cache_tokens",
        metavar="TOKENS",
    ),
    Flag(
        "skip-mm-profiling",
        Group.MULTIMODAL,
        boolean,
        False,
        "On a GPU, do not encode the largest image at the start to see what memory images need: the KV cache gets it, "
        "and a large image may fail for want of memory",
        "cache.skip_mm_profiling",
        arity=Arity.SWITCH,
    ),
    Flag(
        "allowed-media-domains",
        Group.MULTIMODAL,
        domain_list,
        (),
        "Hosts that images and videos may be fetched from, also ones in a private network; redirects are held to it. "
        "Default: every host with a public address",
        "media.allowed_domains",
        metavar="HOST",
        arity=Arity.MANY,
    ),
    Flag(
        "allowed-local-media-path",
        Group.MULTIMODAL,
        path_text,
        None,
        "Folder whose files requests may name by file: addresses. Default: none",
        "media.local_path",
        metavar="FOLDER",
    ),
    Flag(
        "media-loading-threads",
        Group.MULTIMODAL,
        integer(1, _MAX_THREADS),
        8,
        "Threads of an API server that decode and prepare images; half as many more do so for videos",
        "media.loading_threads",
        metavar="N",
        env=(EnvAlias("VLLM_MEDIA_LOADING_THREAD_COUNT"),),
    ),
    Flag(
        "image-fetch-timeout",
        Group.MULTIMODAL,
        number(0, math.inf, exclude_minimum=True),
        5.0,
        "Seconds that fetching an image may take, redirects included",
        "media.fetch_timeout_s",
        metavar="SECONDS",
        env=(EnvAlias("VLLM_IMAGE_FETCH_TIMEOUT"),),
    ),
    Flag(
        "max-media-bytes",
        Group.MULTIMODAL,
        integer(1),
        256 * MIB,
        "Most bytes of the image and video files of a request together (8M, 500k)",
        "media.max_bytes",
        metavar="BYTES",
        env=(EnvAlias("VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB", unit=MIB),),
    ),
    Flag(
        "max-media-memory",
        Group.MULTIMODAL,
        integer(1),
        _DEFAULTS.memory_bytes,
        "Most memory that an API server takes to decode and prepare images and videos (4G), further ones wait; and as "
        "much again for those of open requests, further requests are refused",
        "media.memory_bytes",
        metavar="BYTES",
    ),
    Flag(
        "max-image-pixels",
        Group.MULTIMODAL,
        integer(1, _DEFAULTS.max_pixels),
        _DEFAULTS.max_pixels,
        "Most pixels of an image, known before it is decoded",
        "media.max_pixels",
        metavar="N",
    ),
    Flag(
        "media-url-allow-redirects",
        Group.MULTIMODAL,
        boolean,
        True,
        "Follow redirects of hosts that images and videos are fetched from, five at most; each is checked like the "
        "first address",
        "media.allow_redirects",
        arity=Arity.SWITCH,
        env=(EnvAlias("VLLM_MEDIA_URL_ALLOW_REDIRECTS"),),
    ),
)
