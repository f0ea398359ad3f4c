"""How many workers compute one copy of the model, and in which processes: from the flags, before anything loads."""

import logging

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.device import DeviceInfo, cpu_threads
from tokenmill_engine.config.parallel import ExecutorKind, ParallelConfig, check_tensor_parallel
from tokenmill_engine.config.stages import share_layers
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.values import FlagValues

logger = logging.getLogger(__name__)

_MAX_WORKERS_HERE = 256
"""Of all engine cores of a launcher: a larger product of two flags is a slip."""


def resolve_workers(
    values: FlagValues, architecture: ArchitectureConfig, device: DeviceInfo, num_engines: int
) -> ParallelConfig:
    """The workers of each of `num_engines` engine cores on this machine.

    Raises:
        ConfigError: the model cannot be shared out like this, not on this device, or flags contradict each other.
    """
    keys = ("tensor_parallel_size", "pipeline_parallel_size")
    for key in keys:
        if values[key] > 1 and values["distributed_executor_backend"] == "uni":
            values.settle("distributed_executor_backend", key, "uni is one worker")
    num_members, num_stages = (values[key] for key in keys)
    layers = values["pipeline_parallel_layers"]
    partition = "" if layers is None else values.written("pipeline_parallel_layers")
    if layers is not None and len(layers) > 1 and not values.is_given("pipeline_parallel_size"):
        undo = "unset it" if "pipeline_parallel_layers" in values.from_environment else "leave it out"
        raise ConfigError(
            f"{partition} {','.join(map(str, layers))} is for {len(layers)} stages; add --pipeline-parallel-size "
            f"{len(layers)}, or {undo}"
        )
    share_layers(architecture.num_layers, num_stages, layers, partition, values.stated("pipeline_parallel_size"))
    stated = " and ".join(values.stated(key) for key in keys if values[key] > 1)
    size = num_members * num_stages
    if size == 1:
        return ParallelConfig(executor=_executor_of_one(values, device))
    if device.kind != "cpu":
        raise ConfigError(
            f"{stated} is for the CPU alone in this version, and this server would compute on a GPU; use --device cpu, "
            "or --data-parallel-size for several copies of the model"
        )
    check_tensor_parallel(architecture, num_members, values.stated("tensor_parallel_size"))
    if num_engines * size > _MAX_WORKERS_HERE:
        raise ConfigError(
            f"{stated} for {num_engines} engine cores makes {num_engines * size} processes that compute; use at most "
            f"{_MAX_WORKERS_HERE} on one machine"
        )
    threads = cpu_threads()
    if num_engines * size > threads:
        logger.warning(
            "%s: %d workers share %d cores and will often wait for each other; more cores or fewer workers are quicker",
            stated,
            num_engines * size,
            threads,
        )
    return ParallelConfig(num_members, num_stages, layers, executor="mp")


def _executor_of_one(values: FlagValues, device: DeviceInfo) -> ExecutorKind:
    chosen: ExecutorKind = values["distributed_executor_backend"] or "uni"
    if chosen == "mp" and device.kind != "cpu":
        logger.warning(
            "%s is for the CPU alone in this version: the worker computes in the engine core's process",
            values.stated("distributed_executor_backend"),
        )
        return "uni"
    return chosen
