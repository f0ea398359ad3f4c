"""What an engine core is started with."""

from dataclasses import replace

import pytest

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.supervisor import _engine_environment


@pytest.fixture(scope="module")
def config() -> EngineConfig:
    engine = build_configuration(read_flags(["--device", "cpu", "-dp", "3"], {})).engine
    return replace(engine, device=replace(engine.device, kind="cuda"))


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, ["0", "1", "2"]), ("4,GPU-5,6", ["4", "GPU-5", "6"]), ("", ["0", "1", "2"])]
)
def test_each_rank_sees_a_gpu_of_its_own(config: EngineConfig, visible: str | None, expected: list[str]) -> None:
    environment = {"A": "b"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    seen = [_engine_environment(environment, config, rank) for rank in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == expected
    assert all(each["A"] == "b" for each in seen)


def test_a_single_engine_core_sees_what_we_see(config: EngineConfig) -> None:
    alone = replace(config, data_parallel_size=1)
    assert _engine_environment({"CUDA_VISIBLE_DEVICES": "3,4"}, alone, 0) == {"CUDA_VISIBLE_DEVICES": "3,4"}
    on_cpu = replace(config, device=replace(config.device, kind="cpu"))
    assert _engine_environment({}, on_cpu, 1) == {}
