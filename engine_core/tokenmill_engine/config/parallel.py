"""How many workers share one model, and which of them there may be. Torch-free."""

from dataclasses import dataclass
from typing import Literal

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.media import EncoderMode, VisionConfig
from tokenmill_engine.errors import ConfigError

ExecutorKind = Literal["uni", "mp"]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The workers of one engine core."""

    tensor_parallel_size: int = 1
    """Workers that compute each layer together, every one a part of its heads and of its feed-forward width."""
    pipeline_parallel_size: int = 1
    """Groups of workers that have the layers one after another."""
    pipeline_layers: tuple[int, ...] | None = None
    """How many layers each of those groups has; None: as evenly as can be (`config.stages`)."""
    executor: ExecutorKind = "uni"
    """`uni`: the only worker is a thread of the engine core; `mp`: each worker is a process."""
    disable_custom_all_reduce: bool = False
    """On GPUs: workers of one stage add up through NCCL alone, and not through memory that all of them map."""

    @property
    def world_size(self) -> int:
        """All workers of one engine core."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def reporting_rank(self) -> int:
        """Of the worker whose results count: the first one of the last stage. Ranks go through stage after stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size


def check_tensor_parallel(architecture: ArchitectureConfig, size: int, stated: str | None = None) -> None:
    """Whether `size` workers can share the layers of a model. `stated` is the flag with its value, as it was written.

    Query heads and the feed-forward width must divide. Key-value heads divide too, or several workers hold the same
    one: then it is `size` that divides by their number. The vocabulary need not divide, if something is left for the
    last worker.

    Raises:
        ConfigError: they cannot. Names the numbers in the way and every size that works.
    """
    obstacles = _obstacles(architecture, size)
    if not obstacles:
        return
    valid = ", ".join(map(str, tensor_parallel_sizes(architecture)))
    raise ConfigError(
        f"{stated or f'--tensor-parallel-size {size}'} does not fit {architecture.name} with {', '.join(obstacles)}; "
        f"sizes that do: {valid}"
    )


def check_encoder_parallel(vision: VisionConfig, mode: EncoderMode, size: int, stated: str | None = None) -> None:
    """Whether `size` workers can share a vision encoder. Its heads need not divide: some workers have one more.

    Raises:
        ConfigError: some would have none. Names every size that works, and the mode in which all do.
    """
    if mode == "weights" and size > vision.num_heads:
        raise ConfigError(
            f"{stated or f'--tensor-parallel-size {size}'} is more than the {vision.num_heads} attention heads of the "
            f"vision encoder; sizes up to {vision.num_heads} work, and all do with --mm-encoder-tp-mode data, with "
            "which each worker has all of the encoder"
        )


def check_first_stage(vision: VisionConfig, num_layers: int, stated: str = "the pipeline") -> None:
    """Whether a first stage of `num_layers` layers has all those behind which something of images is added. `stated`
    is the flag that makes it so short.

    Raises:
        ConfigError: it has not.
    """
    needed = len(vision.deepstack_layers)
    if needed > num_layers:
        raise ConfigError(
            f"{stated} leaves {num_layers} of the model's layers in the first stage, which needs the {needed} behind "
            "which images are added; use fewer stages, or a longer first one with --pipeline-parallel-layers"
        )


def tensor_parallel_sizes(architecture: ArchitectureConfig) -> list[int]:
    """All numbers of workers that can share the layers of a model, ascending."""
    return [size for size in range(1, architecture.num_heads + 1) if not _obstacles(architecture, size)]


def _obstacles(architecture: ArchitectureConfig, size: int) -> list[str]:
    """The numbers of a model that `size` cannot share out, in words."""
    if size < 1:
        return [f"{architecture.num_heads} attention heads"]
    obstacles = []
    num_kv_heads, width = architecture.num_kv_heads, architecture.intermediate_size
    if architecture.num_heads % size:
        obstacles.append(f"{architecture.num_heads} attention heads")
    if num_kv_heads % size and size % num_kv_heads:
        obstacles.append(f"{num_kv_heads} key-value head{'s' if num_kv_heads > 1 else ''}")
    if width % size:
        obstacles.append(f"a feed-forward width of {width}")
    if -(-architecture.vocab_size // size) * (size - 1) >= architecture.vocab_size:
        obstacles.append(f"a vocabulary of {architecture.vocab_size}")
    return obstacles
