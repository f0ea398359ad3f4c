"""Whether our side can run what a comparison is going to ask of it: told before anything is measured, not after the
variants that come first."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenmill_engine.config.device import detect_device
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.bench.compare_plan import Session
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.data_parallel import resolve_data_parallel
from tokenmill_server.flags.workers import resolve_workers


def check_variants(sessions: Sequence[Session], models: Mapping[str, Path], flags: Sequence[str]) -> None:
    """Reads our flags, and shares out each model as they say. `models` by what sessions call them; `flags` are those of
    all our processes.

    Raises:
        ConfigError: a flag is wrong, or the model cannot be shared out like this.
        StartupError: the machine has not got the device, or fewer of them than that takes.
    """
    variants = dict.fromkeys((each.model, each.variant, each.flags) for each in sessions if each.side == "ours")
    for model, variant, own in variants:
        path = str(models[model])
        try:
            values = read_flags(["--model", path, *flags, *own])
            num_engines = resolve_data_parallel(values).size_local
            resolve_workers(values, resolve_model(path).architecture, detect_device(values["device"]), num_engines)
        except (ConfigError, StartupError) as error:
            raise type(error)(f"nothing is measured, since ours, {model}, {variant} is impossible: {error}") from None
