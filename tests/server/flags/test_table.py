"""The rows against the configuration tree and against each other."""

import dataclasses
from typing import Any

import pytest

from tokenmill_engine.config import engine as engine_config
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_server.config import DataParallelConfig, FaultConfig, ServerConfig
from tokenmill_server.flags.flag import Flag
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED
from tokenmill_server.multimodal.settings import MediaSettings

SECTIONS: dict[str, Any] = {
    "engine": engine_config.EngineConfig,
    "model": engine_config.ModelConfig,
    "cache": engine_config.CacheConfig,
    "scheduler": engine_config.SchedulerConfig,
    "device": engine_config.DeviceConfig,
    "observability": engine_config.ObservabilityConfig,
    "parallel": ParallelConfig,
    "server": ServerConfig,
    "data_parallel": DataParallelConfig,
    "faults": FaultConfig,
    "media": MediaSettings,
}


@pytest.mark.parametrize("flag", FLAGS.values(), ids=lambda flag: flag.name)
def test_destination_exists_and_default_is_valid(flag: Flag) -> None:
    section, _, name = flag.destination.partition(".")
    assert name in {field.name for field in dataclasses.fields(SECTIONS[section])}
    if flag.default not in (None, ()):
        assert flag.parse(flag.default) == flag.default


def test_names_are_unique() -> None:
    names = [name for flag in FLAGS.values() for name in (flag.name, *flag.short)]
    names += [name for row in UNSUPPORTED.values() for name in (row.name, *row.short)]
    assert len(names) == len(set(names))


def test_neutral_values_are_lower_case() -> None:
    assert all(value == value.lower() for row in UNSUPPORTED.values() for value in row.neutral)
