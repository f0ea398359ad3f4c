"""The frozen configuration tree of one engine core. Built once from the flag table, sent to every process.

Every value is resolved: no `auto`, no None that means "decide later", except where a docstring says that
only the worker can know (KV memory).
"""

from dataclasses import dataclass, field
from typing import Literal

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.media import EncoderMode, MediaConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.config.pooling import PoolingConfig
from tokenmill_engine.config.structured_output import StructuredOutputConfig

DtypeName = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["safetensors", "gguf", "dummy"]
DeviceKind = Literal["cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and how to load it. `path` is a folder (Hugging Face layout) or a `.gguf` file, always local."""

    name: str
    """What the user typed; shown in logs."""
    path: str
    tokenizer_path: str
    architecture: ArchitectureConfig
    load_format: LoadFormat
    dtype: DtypeName
    seed: int
    max_model_len: int
    """Upper bound on prompt + output tokens. The pool may hold less; see `max_model_len_explicit`."""
    max_model_len_explicit: bool
    """True: a pool too small for `max_model_len` is a start error. False: the length is lowered to what fits."""
    eos_token_ids: tuple[int, ...]
    max_logprobs: int = 20
    media: MediaConfig | None = None
    """How prompts carry images; None for models of text alone, and for others of which only that is wanted."""
    encoder_mode: EncoderMode = "weights"
    """How workers that share each layer share the vision encoder."""
    pooling: PoolingConfig | None = None
    """How texts become vectors; None for a model that generates text."""

    @property
    def num_positions(self) -> int:
        """Positions that tokens may have. Those of a video that tells the time may be further apart than its tokens,
        but not beyond what the model was made for."""
        per_token = 1 if self.media is None else self.media.positions_per_token
        most = min(per_token * self.max_model_len, self.architecture.max_position_embeddings)
        return max(self.max_model_len, most)

    @property
    def num_parameters(self) -> int:
        """Weights of the decoder and of what stands in front of it."""
        return self.architecture.num_parameters + (self.media.vision.num_parameters if self.media is not None else 0)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache. Of the three sizes the first that is set wins: blocks, bytes, share of memory."""

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.90
    enable_prefix_caching: bool = True
    skip_mm_profiling: bool = False
    """Memory for images, their encoder's and that of its outputs, is not left out of the share."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The step budget and the order of requests."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    explicit_budget: bool = False
    """Every step may use all of `max_num_batched_tokens`: it was asked for, or nobody waits for single tokens."""
    target_itl_ms: float | None = None
    """Inter-token latency that running requests keep while prompts are computed beside them."""
    policy: SchedulingPolicy = "fcfs"
    async_scheduling: bool = True
    max_num_encoder_tokens: int = 16384
    """Rows that the encoder may give in one step, of all images together: the largest image has no more."""
    encoder_cache_tokens: int = 16384
    """Rows of encoder output that are kept for later steps and other requests."""
    disable_chunked_mm_input: bool = False
    """An image is computed in one step, never in chunks: what does not fit into a step ends in front of it."""
    whole_prompts: bool = False
    """Every prompt is computed in one step: its tokens see those that come after them."""

    @property
    def max_item_tokens(self) -> int:
        """Placeholders of the largest image that can be served."""
        most = min(self.max_num_encoder_tokens, self.encoder_cache_tokens)
        return min(most, self.max_num_batched_tokens) if self.disable_chunked_mm_input else most


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Where tensors live. `num_threads` is for the CPU path."""

    kind: DeviceKind = "cpu"
    num_threads: int = 1
    enforce_eager: bool = False
    attention_backend: str = "auto"


@dataclass(frozen=True, slots=True)
class ObservabilityConfig:
    """Logs and metrics."""

    model_name: str = ""
    """Value of the `model_name` label: the first served name."""
    log_level: LogLevel = "INFO"
    log_stats: bool = True
    stats_interval_s: float = 10.0
    metrics_namespaces: tuple[str, ...] = ("tokenmill",)
    """Prefixes of metric names; two of them export every metric twice."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine core needs to know, the same for every one that a launcher starts."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    structured_output: StructuredOutputConfig = field(default_factory=StructuredOutputConfig)
    media_store_bytes: int = 0
    """Prepared media that an engine core keeps for later requests when nobody needs them at the moment."""
    data_parallel_size: int = 1
    """Engine cores that one API server chooses from. Processes know them as engines 0 to size - 1."""
    data_parallel_size_local: int = 1
    """Those that share this machine's memory and cores."""
    data_parallel_first_rank: int = 0
    """Rank of engine 0: above 0 where other servers, which this one knows nothing of, have the ranks before it."""

    def rank_of(self, engine: int) -> int:
        """The number of an engine core in the whole deployment: what metrics, titles and clients call it."""
        return self.data_parallel_first_rank + engine
