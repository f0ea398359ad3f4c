"""How many workers an engine core gets and where, and what is refused before anything loads."""

import logging
from pathlib import Path

import pytest

from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.device import DeviceInfo
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.flags import build, workers
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.values import FlagValues, offer_environment, offer_keywords

GIB = 2**30
TWO_GPUS = DeviceInfo("cuda", "GPU", 80 * GIB, 2, (9, 0))


def configure(arguments: str, **environment: str) -> EngineConfig:
    """Of the embedded model, with 9 query heads, 3 key-value heads and a width of 1536, unless another is named."""
    return build_configuration(read_flags(["--device", "cpu", *arguments.split()], environment)).engine


@pytest.fixture(scope="module")
def many_heads() -> Path:
    """512 query heads, 2 key-value heads."""
    return cached_tiny_model(
        "llama", num_attention_heads=512, num_key_value_heads=2, head_dim=2, intermediate_size=512, num_hidden_layers=1
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ParallelConfig()),
        ("-tp 1", ParallelConfig()),
        ("--distributed-executor-backend uni", ParallelConfig()),
        ("--distributed-executor-backend mp", ParallelConfig(executor="mp")),
        ("-tp 3", ParallelConfig(tensor_parallel_size=3, executor="mp")),
        ("-tp 3 --distributed-executor-backend mp", ParallelConfig(tensor_parallel_size=3, executor="mp")),
        ("-tp 3 -dp 2", ParallelConfig(tensor_parallel_size=3, executor="mp")),
        ("-pp 2", ParallelConfig(pipeline_parallel_size=2, executor="mp")),
        ("-pp 4 -tp 3", ParallelConfig(3, 4, executor="mp")),
        ("-pp 2 --pipeline-parallel-layers 12,18", ParallelConfig(1, 2, (12, 18), executor="mp")),
        ("--pipeline-parallel-layers 30", ParallelConfig()),
    ],
)
def test_workers_of_an_engine_core(arguments: str, expected: ParallelConfig) -> None:
    assert configure(arguments).parallel == expected


def test_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("tensor_parallel_size: 3\n")
    values = FlagValues()
    offer_keywords(values, {"tensor_parallel_size": 3, "device": "cpu"}, "LLM")
    assert {
        configure("--tensor_parallel_size=3").parallel,
        configure(f"--config {tmp_path}/flags.yaml").parallel,
        configure("", TOKENMILL_TENSOR_PARALLEL_SIZE="3").parallel,
        build_configuration(values, offline=True).engine.parallel,
    } == {ParallelConfig(tensor_parallel_size=3, executor="mp")}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-tp 2", "with 9 attention heads, 3 key-value heads; sizes that do: 1, 3"),
        ("-tp 9", "with a feed-forward width of 1536; sizes that do: 1, 3"),
        ("-tp 0", "--tensor-parallel-size must be a whole number, 1 to 256; got '0'"),
        ("-tp 1000", "--tensor-parallel-size must be a whole number, 1 to 256; got '1000'"),
        (
            "-tp 3 --distributed-executor-backend uni",
            "--distributed-executor-backend contradicts --tensor-parallel-size: uni is one worker; leave one out",
        ),
        ("--distributed-executor-backend ray", "must be one of uni, mp (the workers of an engine core are processes"),
        ("--distributed-executor-backend external_launcher", "(an engine core starts its workers itself)"),
        ("--distributed-executor-backend my.Executor", "must be one of uni, mp; got 'my.Executor'"),
        ("-pp 31", "--pipeline-parallel-size 31 is more than the 30 layers of the model; sizes up to 30 work"),
        (
            "-pp 2 --pipeline-parallel-layers 10,10",
            "--pipeline-parallel-layers 10,10 does not fit --pipeline-parallel-size 2 and the 30 layers of the model: "
            "give 2 numbers above 0 that add up to 30, for example 15,15",
        ),
        ("-pp 2 --pipeline-parallel-layers 30,0", "must be whole numbers from 1 on with commas between them"),
        ("-pp 2 -tp 2", "--tensor-parallel-size 2 does not fit"),
        (
            "-pp 2 --distributed-executor-backend uni",
            "--distributed-executor-backend contradicts --pipeline-parallel-size: uni is one worker; leave one out",
        ),
        ("-tp 3 -pp 30 -dp 3", "--tensor-parallel-size 3 and --pipeline-parallel-size 30 for 3 engine cores makes 270"),
        ("-tp 3 -dp 86", "--tensor-parallel-size 3 for 86 engine cores makes 258 processes that compute; use at most"),
    ],
)
def test_refused_before_anything_loads(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(arguments)
    assert message in raised.value.message
    assert "\n" not in raised.value.message


def test_layers_of_stages_by_the_variable_of_vllm() -> None:
    layers = {"VLLM_PP_LAYER_PARTITION": "10,20"}
    assert configure("-pp 2", **layers).parallel == ParallelConfig(1, 2, (10, 20), executor="mp")
    with pytest.raises(
        ConfigError, match=r"^VLLM_PP_LAYER_PARTITION 10,20 does not fit -pp 3|^VLLM_PP_LAYER_PARTITION"
    ):
        configure("-pp 3", **layers)
    alone = r"^VLLM_PP_LAYER_PARTITION 10,20 is for 2 stages; add --pipeline-parallel-size 2, or unset it$"
    with pytest.raises(ConfigError, match=alone):
        configure("", **layers)


def test_mistakes_are_named_as_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("tensor-parallel-size: 2\n")
    with pytest.raises(ConfigError, match=r"^tensor-parallel-size: 2 in .*flags.yaml does not fit LlamaForCausalLM"):
        configure(f"--config {tmp_path}/flags.yaml")
    values = FlagValues()
    offer_keywords(values, {"tensor_parallel_size": 2, "device": "cpu"}, "LLM")
    with pytest.raises(ConfigError, match=r"^LLM\(tensor_parallel_size=2\) does not fit LlamaForCausalLM"):
        build_configuration(values, offline=True)


def test_environment_yields_instead_of_contradicting() -> None:
    uni, three = {"TOKENMILL_DISTRIBUTED_EXECUTOR_BACKEND": "uni"}, {"TOKENMILL_TENSOR_PARALLEL_SIZE": "3"}
    assert configure("-tp 3", **uni).parallel == ParallelConfig(tensor_parallel_size=3, executor="mp")
    assert configure("--distributed-executor-backend uni", **three).parallel == ParallelConfig()
    values = read_flags(["--device", "cpu"], {})
    offer_environment(values, uni | three)
    with pytest.raises(ConfigError, match=r"^TOKENMILL_DIST\w+ contradicts TOKENMILL_TENSOR_PARALLEL_SIZE: "):
        build_configuration(values)


def test_cores_are_shared_by_all_workers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(build, "cpu_threads", lambda: 12)
    monkeypatch.setattr(workers, "cpu_threads", lambda: 12)
    with caplog.at_level(logging.WARNING):
        flags = ("-tp 3", "-tp 3 -dp 2", "-tp 3 -dp 4", "-tp 3 -dp 4 -dpl 2", "-tp 1 -dp 3")
        assert [configure(arguments).device.num_threads for arguments in flags] == [4, 2, 1, 2, 4]
        assert caplog.messages == []
        assert configure("-tp 3 -dp 5").device.num_threads == 1
    assert "--tensor-parallel-size 3: 15 workers share 12 cores and will often wait" in caplog.text


def test_only_workers_of_this_machine_count(many_heads: Path) -> None:
    """A launcher of API servers alone has none of them."""
    with pytest.raises(ConfigError, match="use at most 256 on one machine"):
        configure(f"{many_heads} -tp 256 -dp 2")
    assert configure(f"{many_heads} -tp 256 -dp 2 -dpl 1").parallel.world_size == 256
    assert configure(f"{many_heads} -tp 256 -dp 2 -dpl 0").parallel.world_size == 256


def on_gpus(monkeypatch: pytest.MonkeyPatch, device: DeviceInfo = TWO_GPUS) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: device)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ParallelConfig()),
        ("--distributed-executor-backend mp", ParallelConfig(executor="mp")),
        ("-pp 2", ParallelConfig(1, 2, executor="mp")),
        ("{wide} -tp 2", ParallelConfig(2, executor="mp")),
        ("{wide} -tp 2 --disable-custom-all-reduce", ParallelConfig(2, executor="mp", disable_custom_all_reduce=True)),
    ],
)
def test_workers_on_gpus(
    monkeypatch: pytest.MonkeyPatch, many_heads: Path, arguments: str, expected: ParallelConfig
) -> None:
    on_gpus(monkeypatch)
    assert configure(arguments.format(wide=many_heads)).parallel == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{wide} -tp 4", "--tensor-parallel-size 4 needs 4 GPUs, 2 are visible; use at most --tensor-parallel-size 2"),
        ("-tp 3", "--tensor-parallel-size 3 needs 3 GPUs, 2 are visible; use at most --tensor-parallel-size 1"),
        ("-pp 3", "--pipeline-parallel-size 3 needs 3 GPUs, 2 are visible; use at most --pipeline-parallel-size 2"),
        ("-dp 3", "--data-parallel-size 3 needs 3 GPUs, 2 are visible; use at most --data-parallel-size 2"),
        (
            "-dp 2 -pp 2",
            "--data-parallel-size 2 and --pipeline-parallel-size 2 need 4 GPUs, 2 are visible; use sizes with a "
            "product of at most 2",
        ),
    ],
)
def test_each_worker_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, many_heads: Path, arguments: str, message: str
) -> None:
    on_gpus(monkeypatch)
    with pytest.raises(StartupError) as raised:
        configure(arguments.format(wide=many_heads))
    assert raised.value.message == message


def test_weights_are_shared_out_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 in float32 takes 0.5 GiB."""
    on_gpus(monkeypatch, DeviceInfo("cuda", "GPU", GIB // 3, 2, (9, 0)))
    assert configure("-pp 2 --dtype float32").parallel.world_size == 2
    with pytest.raises(StartupError, match=r"or more GPUs for each copy of it \(--tensor-parallel-size\)$"):
        configure("-dp 2 --dtype float32")


def test_workers_on_gpus_compute_with_few_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_gpus(monkeypatch)
    monkeypatch.setattr(workers, "cpu_threads", lambda: 1)
    with caplog.at_level(logging.WARNING):
        assert configure("-pp 2").device.num_threads == 1
    assert caplog.messages == []


def test_weights_are_there_once_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for each engine core: SmolLM2 in float32 takes 0.5 GiB."""
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cpu", "cpu", GIB, 1))
    assert configure("-tp 3 --dtype float32").parallel.world_size == 3
    with pytest.raises(StartupError, match="use a smaller --data-parallel-size than 2"):
        configure("-tp 3 -dp 2 --dtype float32")


def test_bytes_of_the_cache_are_those_of_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cpu", "cpu", GIB, 1))
    assert configure("--dtype float32 --kv-cache-memory-bytes 300M").cache.kv_cache_memory_bytes == 300 * 2**20
    with pytest.raises(StartupError, match=r"need 1.4 GiB, this machine has 1.0 GiB") as raised:
        configure("-tp 3 --dtype float32 --kv-cache-memory-bytes 300M")
    remedy = raised.value.message.partition("use ")[2]
    assert configure(f"-tp 3 --dtype float32 {remedy}").parallel.world_size == 3
