"""Resolution against the embedded model: what every flag becomes, and what is refused before anything starts."""

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.support.http_flags import HTTP_CASES, TLS_FIELDS
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.device import DeviceInfo
from tokenmill_engine.config.engine import DeviceKind
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.config import Configuration, FaultConfig, LoadBalancing
from tokenmill_server.flags import build
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.values import FlagValues, offer_keywords

MODEL = str(embedded_model_path())
GIB = 2**30


def configure(*arguments: str, offline: bool = False, **environment: str) -> Configuration:
    return build_configuration(read_flags(["--device", "cpu", *arguments], environment), offline=offline)


def field(configuration: Configuration, destination: str) -> Any:
    section, _, name = destination.partition(".")
    owners = {
        "server": configuration.server,
        "data_parallel": configuration.data_parallel,
        "faults": configuration.faults,
        "media": configuration.server.media,
    }
    owner: Any = owners.get(section, configuration.engine)
    if section not in (*owners, "engine"):
        owner = getattr(owner, section)
    return getattr(owner, name)


def test_defaults() -> None:
    configuration = configure()
    engine, server = configuration.engine, configuration.server
    assert (engine.model.name, engine.model.path) == ("SmolLM2-135M-Instruct", MODEL)
    assert (engine.model.load_format, engine.model.dtype) == ("gguf", "bfloat16")
    assert (engine.model.max_model_len, engine.model.max_model_len_explicit) == (8192, False)
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (256, 2048)
    assert (server.host, server.port, server.api_server_count) == ("127.0.0.1", 8000, 1)
    assert server.served_model_names == ("SmolLM2-135M-Instruct",)
    assert server.shutdown_timeout_s == 30
    assert configuration.faults == FaultConfig(max_engine_restarts=0, engine_stall_timeout_s=300.0)


CASES = [
    (["--model", MODEL], "model.name", MODEL),
    (["--load-format", "dummy"], "model.load_format", "dummy"),
    (["--dtype", "float32"], "model.dtype", "float32"),
    (["--seed", "7"], "model.seed", 7),
    (["--max-model-len", "1K"], "model.max_model_len", 1024),
    (["--max-model-len", "1K"], "model.max_model_len_explicit", True),
    (["--max-model-len", "auto"], "model.max_model_len_explicit", False),
    (["--max-logprobs", "-1"], "model.max_logprobs", -1),
    (["--served-model-name", "a", "b"], "server.served_model_names", ("a", "b")),
    (["--served-model-name", "a", "b"], "observability.model_name", "a"),
    (["--host", "0.0.0.0"], "server.host", "0.0.0.0"),
    (["--port", "9"], "server.port", 9),
    (["--uds", "/tmp/x.sock"], "server.uds", "/tmp/x.sock"),
    (["--api-key", "k"], "server.api_keys", ("k",)),
    (["--chat-template", "{{ messages }}"], "server.chat_template", "{{ messages }}"),
    (["--stream-interval", "8"], "server.stream_interval", 8),
    (["--no-enable-auto-tool-choice"], "server.enable_auto_tool_choice", False),
    (["--tool-call-parser", "hermes"], "server.tool_call_parser", "hermes"),
    (["--exclude-tools-when-tool-choice-none"], "server.exclude_tools_when_tool_choice_none", True),
    (["--reasoning-parser", "qwen3"], "server.reasoning_parser", "qwen3"),
    (["--shutdown-timeout", "1.5"], "server.shutdown_timeout_s", 1.5),
    *HTTP_CASES,
    (
        ["--structured-outputs-config.backend", "guidance", "--structured-outputs-config.disable_any_whitespace=true"],
        "engine.structured_output",
        StructuredOutputConfig("guidance", any_whitespace=False),
    ),
    (
        ["--structured-outputs-config", '{"disable_additional_properties": false}'],
        "engine.structured_output",
        StructuredOutputConfig(additional_properties=True),
    ),
    (["--api-server-count", "4"], "server.api_server_count", 4),
    (["-dp", "2"], "engine.data_parallel_size", 2),
    (["-tp", "3"], "parallel.tensor_parallel_size", 3),
    (["-pp", "3"], "parallel.pipeline_parallel_size", 3),
    (["-pp", "2", "--pipeline-parallel-layers", "12,18"], "parallel.pipeline_layers", (12, 18)),
    (["--distributed-executor-backend", "mp"], "parallel.executor", "mp"),
    (["--disable-custom-all-reduce"], "parallel.disable_custom_all_reduce", True),
    (["-dp", "4", "-dpr", "1", "-dpl", "2"], "engine.data_parallel_first_rank", 1),
    (["-dp", "4", "-dpr", "1", "-dpl", "2"], "data_parallel.size_local", 2),
    (["-dp", "4", "-dpn", "3"], "data_parallel.start_rank", 3),
    (["-dp", "4", "-dpe", "-dpr", "3"], "data_parallel.load_balancing", LoadBalancing.EXTERNAL),
    (["-dp", "2", "-dpl", "1", "--headless"], "data_parallel.headless", True),
    (["-dpa", "10.0.0.1"], "data_parallel.address", "10.0.0.1"),
    (["-dpp", "5"], "data_parallel.rpc_port", 5),
    (["--data-parallel-token", "s"], "data_parallel.token", "s"),
    (["--max-engine-restarts", "1"], "faults.max_engine_restarts", 1),
    (["-dp", "2"], "faults.max_engine_restarts", 3),
    (["--engine-stall-timeout", "12.5"], "faults.engine_stall_timeout_s", 12.5),
    (["--block-size", "32"], "cache.block_size", 32),
    (["--gpu-memory-utilization", "0.5"], "cache.gpu_memory_utilization", 0.5),
    (["--kv-cache-memory-bytes", "1G"], "cache.kv_cache_memory_bytes", GIB),
    (["--num-gpu-blocks-override", "20"], "cache.num_gpu_blocks_override", 20),
    (["--no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
    (["--max-num-seqs", "4"], "scheduler.max_num_seqs", 4),
    (["--max-num-batched-tokens", "32"], "scheduler.max_num_batched_tokens", 32),
    (["--max-num-batched-tokens", "32"], "scheduler.max_num_seqs", 32),
    (["--max-num-batched-tokens", "2048"], "scheduler.explicit_budget", True),
    (["--target-itl-ms", "12.5"], "scheduler.target_itl_ms", 12.5),
    (["--scheduling-policy", "priority"], "scheduler.policy", "priority"),
    (["--no-async-scheduling"], "scheduler.async_scheduling", False),
    (["--disable-chunked-mm-input"], "scheduler.disable_chunked_mm_input", True),
    (["--max-num-encoder-input-tokens", "4096"], "scheduler.max_num_encoder_tokens", 4096),
    (["--encoder-cache-size", "8k"], "scheduler.encoder_cache_tokens", 8000),
    (["--mm-processor-cache-gb", "0.5"], "media.cache_gb", 0.5),
    (["--mm-processor-cache-type", "SHM"], "media.cache_type", "shm"),
    (["--mm-shm-cache-max-object-size-mb", "16"], "media.max_shared_object_mb", 16),
    (["--trust-request-mm-kwargs"], "media.trusts_requests", True),
    (["--video-fetch-timeout", "2.5"], "media.video_fetch_timeout_s", 2.5),
    (["--max-video-pixels", "1m"], "media.max_video_pixels", 10**6),
    (["--max-video-frames", "64"], "media.max_video_frames", 64),
    (["--max-video-duration", "60"], "media.max_video_duration_s", 60.0),
    (["--video-decode-timeout", "5"], "media.video_decode_timeout_s", 5.0),
    (["--mm-encoder-tp-mode", "data"], "model.encoder_mode", "data"),
    (["--skip-mm-profiling"], "cache.skip_mm_profiling", True),
    (["--allowed-media-domains", "a.example", "B.example"], "media.allowed_domains", ("a.example", "b.example")),
    (["--allowed-local-media-path", "/"], "media.local_path", "/"),
    (["--media-loading-threads", "3"], "media.loading_threads", 3),
    (["--max-media-memory", "3G"], "media.memory_bytes", 3 * 2**30),
    (["--image-fetch-timeout", "2.5"], "media.fetch_timeout_s", 2.5),
    (["--max-media-bytes", "8M"], "media.max_bytes", 8 * 2**20),
    (["--max-image-pixels", "1m"], "media.max_pixels", 10**6),
    (["--no-media-url-allow-redirects"], "media.allow_redirects", False),
    (["--enforce-eager"], "device.enforce_eager", True),
    (["--disable-log-stats"], "observability.log_stats", False),
    (["--disable-log-stats"], "observability.metrics_namespaces", ()),
    (["--log-stats-interval", "3"], "observability.stats_interval_s", 3.0),
    (["--log-level", "debug"], "observability.log_level", "DEBUG"),
    (["--log-level", "debug"], "server.log_level", "DEBUG"),
    (["--metrics-namespace", "vllm"], "observability.metrics_namespaces", ("vllm",)),
]
RESOLVED_BY_OTHER_TESTS = {
    "device.kind",
    "device.attention_backend",
    *TLS_FIELDS,
    *("media.limits", "media.video_reading", "media.processor_kwargs"),
    "model.media",
    "model.pooling",
    "model.tokenizer_path",
    "server.default_sampling",
}


@pytest.mark.parametrize(("arguments", "destination", "value"), CASES)
def test_flag_reaches_its_place(arguments: list[str], destination: str, value: object) -> None:
    assert field(configure(*arguments), destination) == value
    if arguments != ["--max-model-len", "auto"]:
        assert field(configure(), destination) != value


def test_every_flag_has_a_case() -> None:
    assert {flag.destination for flag in FLAGS.values()} <= {case[1] for case in CASES} | RESOLVED_BY_OTHER_TESTS


def test_a_budget_is_explicit_wherever_it_was_given(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("max-num-batched-tokens: 2048\ntarget_itl_ms: 30\n")
    scheduler = configure("--config", str(file)).engine.scheduler
    assert (scheduler.explicit_budget, scheduler.target_itl_ms) == (True, 30.0)
    environment = {"TOKENMILL_MAX_NUM_BATCHED_TOKENS": "2048", "TOKENMILL_TARGET_ITL_MS": "7.5"}
    scheduler = configure(**environment).engine.scheduler
    assert (scheduler.explicit_budget, scheduler.target_itl_ms) == (True, 7.5)
    values = FlagValues()
    offer_keywords(values, {"max_num_batched_tokens": 2048, "target_itl_ms": 9, "device": "cpu"}, "LLM")
    scheduler = build_configuration(values, offline=True).engine.scheduler
    assert (scheduler.explicit_budget, scheduler.target_itl_ms) == (True, 9.0)
    values = FlagValues()
    offer_keywords(values, {"max_num_batched_tokens": None, "device": "cpu"}, "LLM")
    scheduler = build_configuration(values, offline=True).engine.scheduler
    assert (scheduler.explicit_budget, scheduler.target_itl_ms) == (False, None)


@pytest.mark.parametrize(("kind", "explicit"), [("cuda", True), ("cpu", False)])
def test_nobody_watches_the_tokens_of_an_llm(
    kind: Literal["cuda", "cpu"], explicit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its steps on a GPU may always use everything, where those of a server are short beside running streams."""
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo(kind, "device", 80 * GIB, 1, (9, 0)))
    assert build_configuration(FlagValues(), offline=True).engine.scheduler.explicit_budget is explicit
    assert build_configuration(FlagValues()).engine.scheduler.explicit_budget is False


@pytest.mark.parametrize(("value", "is_told"), [("1e-9", True), ("0.05", True), ("1", False), ("40", False)])
def test_a_target_that_no_step_keeps(value: str, is_told: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert configure("--target-itl-ms", value).engine.scheduler.target_itl_ms == float(value)
    assert (f"--target-itl-ms {float(value)} is shorter than" in caplog.text) is is_told


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "fast", "40ms"])
def test_a_target_is_a_positive_time(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--target-itl-ms must be a number above 0; got"):
        configure("--target-itl-ms", value)


def test_max_model_len_auto_is_the_default() -> None:
    assert configure("--max-model-len", "auto") == configure()


def test_tokenizer_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "other.gguf").symlink_to(MODEL)
    model = configure("--tokenizer", str(tmp_path / "other.gguf")).engine.model
    assert (model.path, model.tokenizer_path) == (MODEL, str(tmp_path / "other.gguf"))


def test_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 5}))
    assert configure("--generation-config", str(tmp_path)).server.default_sampling == {"temperature": 0.3, "top_k": 5}
    assert configure("--generation-config", "vllm").server.default_sampling == {}


def test_chat_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("hello")
    assert configure("--chat-template", str(file)).server.chat_template == "hello"


def test_threads_are_shared_by_engine_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_threads", lambda: 6)
    assert [configure("-dp", str(n)).engine.device.num_threads for n in (1, 2, 4, 8)] == [6, 3, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "cpus", "count"),
    [
        ([], 2, 1),
        ([], 16, 4),
        ([], 128, 4),
        (["-dp", "2"], 128, 8),
        (["-dp", "2"], 8, 2),
        (["--api-server-count", "7"], 2, 7),
        (["--api-server-count", "1"], 128, 1),
    ],
)
def test_api_servers_follow_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, arguments: list[str], cpus: int, count: int
) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cuda", "GPU", 80 * GIB, 2, (9, 0)))
    monkeypatch.setattr(build, "usable_cpus", lambda: cpus)
    with caplog.at_level(logging.INFO):
        assert configure(*arguments).server.api_server_count == count
    is_told = count > 1 and "--api-server-count" not in arguments
    assert (f"API servers: {count}, for {cpus} CPUs" in caplog.text) == is_told


def test_engine_cores_on_the_cpu_share_one_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "usable_cpus", lambda: 64)
    assert configure("-dp", "2").server.api_server_count == 1
    assert configure("-dp", "2", "-asc", "2").server.api_server_count == 2


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("auto", "cpu", "auto"),
        ("auto", "cuda", "auto"),
        ("native", "cpu", "native"),
        ("triton", "cuda", "triton"),
        ("TORCH_SDPA", "cpu", "auto"),
        ("TRITON_ATTN", "cuda", "auto"),
        ("FLASH_ATTN", "cuda", "flash-attn-4"),
    ],
)
def test_attention_backend(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, kind: DeviceKind, name: str
) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo(kind, kind, 80 * GIB, 1))
    package = tmp_path / "flash_attn" / "cute" / "interface.py"
    package.parent.mkdir(parents=True)
    package.touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert configure("--attention-backend", text).engine.device.attention_backend == name
    assert configure(VLLM_ATTENTION_BACKEND=text).engine.device.attention_backend == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("triton", "asks for triton, which cannot serve this model here: it needs an NVIDIA GPU; use "),
        ("flash-attn-4", "flash-attn-4 is not installed; use --attention-backend auto or native"),
        ("FLASHINFERNO", "must be one of auto, triton, native, flash-attn-4; got 'FLASHINFERNO'"),
    ],
)
def test_attention_backends_that_cannot_serve(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure("--attention-backend", text)
    assert raised.value.message.startswith("--attention-backend ")
    assert message in raised.value.message
    with pytest.raises(ConfigError, match=r"^VLLM_ATTENTION_BACKEND "):
        configure(VLLM_ATTENTION_BACKEND=text)


@pytest.mark.parametrize("text", ["FLASHINFER", "FLASH_ATTN", "XFORMERS", "ROCM_FLASH"])
def test_attention_backends_that_only_vllm_has(text: str, caplog: pytest.LogCaptureFixture) -> None:
    in_call = FlagValues()
    offer_keywords(in_call, {"device": "cpu", "attention_backend": text}, "LLM")
    written = read_flags(["--device", "cpu", "--attention-backend", text], {})
    in_environment = read_flags(["--device", "cpu"], {"VLLM_ATTENTION_BACKEND": text})
    for values in (in_call, written, in_environment):
        origin = values.written("attention_backend")
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert build_configuration(values).engine.device == configure().engine.device
        warnings = [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()]
        assert len(warnings) == 1
        assert warnings[0].startswith(f"{origin} {text} is replaced by native (")


@pytest.mark.parametrize(
    ("gib", "offline", "seqs", "tokens"), [(80, False, 1024, 8192), (80, True, 1024, 16384), (24, True, 256, 2048)]
)
def test_defaults_follow_the_device(
    monkeypatch: pytest.MonkeyPatch, gib: int, offline: bool, seqs: int, tokens: int
) -> None:
    gpu = DeviceInfo("cuda", "GPU", gib * GIB, 2, (9, 0))
    monkeypatch.setattr(build, "detect_device", lambda requested: gpu)
    engine = configure(offline=offline).engine
    assert engine.device.kind == "cuda"
    assert (engine.scheduler.max_num_seqs, engine.scheduler.max_num_batched_tokens) == (seqs, tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/model/here"], "does not exist"),
        (["/no/such/folder"], "does not exist"),
        (["--max-model-len", "9k"], "--max-model-len 9000 is more than the 8192 positions"),
        (["--load-format", "safetensors"], "use --load-format gguf or auto"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "use at most --max-num-seqs 32"),
        (["--uds", "/tmp/s", "--port", "1"], "--uds contradicts --port"),
        (["--uds", "/tmp/s", "--host", "x"], "--uds contradicts --host"),
        (["--num-gpu-blocks-override", "9", "--kv-cache-memory-bytes", "1G"], "both set the size of the KV cache"),
        (["--disable-log-stats", "--metrics-namespace", "vllm"], "--disable-log-stats contradicts --metrics-namespace"),
        (["--chat-template", "/no/file"], "--chat-template /no/file: No such file or directory"),
        (["--generation-config", "/no/folder"], "has no generation_config.json"),
    ],
)
def test_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(*arguments)
    assert message in raised.value.message
    assert "\n" not in raised.value.message


def test_load_format_must_be_that_of_the_files() -> None:
    folder = str(cached_tiny_model("llama"))
    with pytest.raises(ConfigError) as raised:
        configure(folder, "--load-format", "gguf")
    assert raised.value.message == (
        f"--load-format gguf does not fit {folder}, which holds safetensors; use --load-format safetensors or auto"
    )
    values = FlagValues()
    offer_keywords(values, {"load_format": "safetensors", "device": "cpu"}, "LLM")
    with pytest.raises(ConfigError, match=r"LLM\(load_format='safetensors'\) does not fit .* which holds gguf"):
        build_configuration(values)


def test_environment_yields_instead_of_contradicting() -> None:
    values = read_flags(["--uds", "/tmp/s", "--device", "cpu"], {"TOKENMILL_HOST": "0.0.0.0", "TOKENMILL_PORT": "1"})
    server = build_configuration(values).server
    assert (server.uds, server.host, server.port) == ("/tmp/s", "127.0.0.1", 8000)
    values = read_flags(["--port", "1", "--device", "cpu"], {"TOKENMILL_UDS": "/tmp/s"})
    assert build_configuration(values).server.uds is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-memory-bytes", "100T"], "use --kv-cache-memory-bytes "),
        (["-dp", "4", "--dtype", "float32"], "use a smaller --data-parallel-size than 4"),
        (["--dtype", "float32"], "use a smaller model"),
    ],
)
def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    room = 2**28 if arguments[0] == "--dtype" else 2**30
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cpu", "cpu", room, 1))
    with pytest.raises(StartupError, match=message):
        configure(*arguments)


def test_more_engine_cores_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cuda", "GPU", 80 * GIB, 2, (9, 0)))
    with pytest.raises(StartupError, match="use at most --data-parallel-size 2"):
        configure("-dp", "4")


def test_memory_share_on_the_cpu_is_not_dropped_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        configure("--gpu-memory-utilization", "0.5")
    assert "--gpu-memory-utilization has no effect on the CPU; use --kv-cache-memory-bytes" in caplog.text
