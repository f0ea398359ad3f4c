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
    num_layers: int, num_stages: int, partition: Sequence[int] | None = None, stated: str | None = None
) -> list[Stage]:
    """The stages of a model of `num_layers` layers: with as many layers each as `partition` says, or as evenly as can
    be. Of layers that are left over, none goes to the last stage, which has the head, and the first stage, which has
    the embedding, gets one last. `stated` is the flag of the partition with its value, as it was written.

    Raises:
        ConfigError: a stage would have no layer, or the partition does not fit.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} is more than the {num_layers} layers of the model; "
            f"sizes up to {num_layers} work"
        )
    counts = list(partition) if partition is not None else _even(num_layers, num_stages)
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        example = ",".join(map(str, _even(num_layers, num_stages)))
        raise ConfigError(
            f"{stated or 'the partition ' + ','.join(map(str, counts))} does not fit --pipeline-parallel-size "
            f"{num_stages} and the {num_layers} layers of the model: give {num_stages} numbers above 0 that add up to "
            f"{num_layers}, for example {example}"
        )
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [Stage(range(start, start + count), num_layers) for start, count in zip(starts, counts, strict=True)]


def _even(num_layers: int, num_stages: int) -> list[int]:
    count, num_left = divmod(num_layers, num_stages)
    last_longer = num_stages - 1
    return [count + (last_longer - num_left <= stage < last_longer) for stage in range(num_stages)]
