"""How many workers compute one copy of the model, and in which processes: from the flags, before anything loads."""

import logging

from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.device import DeviceInfo, cpu_threads
from tokenmill_engine.config.parallel import ParallelConfig, check_tensor_parallel, tensor_parallel_sizes
from tokenmill_engine.config.stages import share_layers
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.values import FlagValues

logger = logging.getLogger(__name__)

_MAX_WORKERS_HERE = 256
"""Of all engine cores of a launcher: a larger product of two flags is a slip."""


def resolve_workers(
    values: FlagValues, architecture: ArchitectureConfig, device: DeviceInfo, num_engines: int
) -> ParallelConfig:
    """The workers of each of `num_engines` engine cores on this machine.

    Raises:
        ConfigError: the model cannot be shared out like this, or flags contradict each other.
        StartupError: there are fewer GPUs than workers.
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
    check_tensor_parallel(architecture, num_members, values.stated("tensor_parallel_size"))
    if device.kind == "cuda":
        _check_devices(values, architecture, device, num_engines)
    custom = {"disable_custom_all_reduce": values["disable_custom_all_reduce"]}
    if size == 1:
        return ParallelConfig(executor=values["distributed_executor_backend"] or "uni", **custom)
    if num_engines * size > _MAX_WORKERS_HERE:
        raise ConfigError(
            f"{stated} for {num_engines} engine cores makes {num_engines * size} processes that compute; use at most "
            f"{_MAX_WORKERS_HERE} on one machine"
        )
    threads = cpu_threads()
    if device.kind == "cpu" and num_engines * size > threads:
        logger.warning(
            "%s: %d workers share %d cores and will often wait for each other; more cores or fewer workers are quicker",
            stated,
            num_engines * size,
            threads,
        )
    return ParallelConfig(num_members, num_stages, layers, executor="mp", **custom)


def engines_flag(values: FlagValues) -> str:
    """The flag that says how many engine cores there are on this machine."""
    return "data_parallel_size_local" if values.is_given("data_parallel_size_local") else "data_parallel_size"


def _check_devices(values: FlagValues, architecture: ArchitectureConfig, device: DeviceInfo, num_engines: int) -> None:
    """Each worker has a GPU of its own. Raises StartupError."""
    num_members, num_stages = values["tensor_parallel_size"], values["pipeline_parallel_size"]
    needed = num_engines * num_members * num_stages
    if needed <= device.count:
        return
    sizes = {
        engines_flag(values): num_engines,
        "tensor_parallel_size": num_members,
        "pipeline_parallel_size": num_stages,
    }
    above_one = [key for key, size in sizes.items() if size > 1]
    stated = " and ".join(map(values.stated, above_one))
    if len(above_one) > 1:
        remedy = f"use sizes with a product of at most {device.count}"
    else:
        (key,) = above_one
        most = device.count
        if key == "tensor_parallel_size":
            most = max(size for size in tensor_parallel_sizes(architecture) if size <= device.count)
        remedy = f"use at most --{FLAGS[key].name} {most}"
    raise StartupError(
        f"{stated} need{'s' if len(above_one) == 1 else ''} {needed} GPUs, {device.count} "
        f"{'is' if device.count == 1 else 'are'} visible; {remedy}"
    )
