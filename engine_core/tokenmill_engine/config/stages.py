"""Which layers the stages of a pipeline have. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill_engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that one group of workers has: `layers` of `num_layers`. The first stage has the embedding
    as well, the last one the final norm and the head."""

    layers: range
    num_layers: int

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.num_layers

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last


def whole_model(num_layers: int) -> Stage:
    """One stage for everything."""
    return Stage(range(num_layers), num_layers)


def share_layers(
    num_layers: int,
    num_stages: int,
    partition: Sequence[int] | None = None,
    written: str = "the partition",
    stated: str | None = None,
) -> list[Stage]:
    """The stages of a model of `num_layers` layers: with as many layers each as `partition` says, or as evenly as can
    be. Of layers that are left over, none goes to the last stage, which has the head, and the first stage, which has
    the embedding, gets one last. `written` is the flag of the partition, as it was written, and `stated` that of the
    number of stages with its value.

    Raises:
        ConfigError: a stage would have no layer, or the partition does not fit.
    """
    stated = stated or f"--pipeline-parallel-size {num_stages}"
    if num_stages > num_layers:
        raise ConfigError(f"{stated} is more than the {num_layers} layers of the model; sizes up to {num_layers} work")
    counts = list(partition) if partition is not None else _even(num_layers, num_stages)
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        example = ",".join(map(str, _even(num_layers, num_stages)))
        raise ConfigError(
            f"{written} {','.join(map(str, counts))} does not fit {stated} and the {num_layers} layers of the model: "
            f"give {num_stages} number{'s' if num_stages > 1 else ''} above 0 that add up to {num_layers}, for example "
            f"{example}"
        )
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [Stage(range(start, start + count), num_layers) for start, count in zip(starts, counts, strict=True)]


def _even(num_layers: int, num_stages: int) -> list[int]:
    count, num_left = divmod(num_layers, num_stages)
    last_longer = num_stages - 1
    return [count + (last_longer - num_left <= stage < last_longer) for stage in range(num_stages)]
