import logging
from pathlib import Path

import pytest

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.values import FlagValues, offer_keywords


def write(folder: Path, text: str) -> str:
    file = folder / "flags.yaml"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_precedence_command_line_file_environment_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 2\nmax-num-seqs: 2\n")
    environment = {"TOKENMILL_PORT": "3", "TOKENMILL_MAX_NUM_SEQS": "3", "TOKENMILL_BLOCK_SIZE": "32"}
    values = read_flags(["--port", "1", "--config", file], environment)
    assert [values[key] for key in ("port", "max_num_seqs", "block_size", "seed")] == [1, 2, 32, 0]


def test_file_spellings_lists_and_switches(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "model: m\nserved_model_name: [a, b]\nmax-model-len: 32k\nenable-prefix-caching: false\napi-key: k\n"
        "decode-context-parallel-size: 1\nuds:\n",
    )
    values = read_flags(["--config", file], {})
    assert values["served_model_name"] == ("a", "b")
    assert (values["model"], values["max_model_len"], values["enable_prefix_caching"]) == ("m", 32000, False)
    assert values["api_key"] == ("k",)
    assert not values.is_given("uds")


def test_positional_model_beats_the_file(tmp_path: Path) -> None:
    assert read_flags(["x", "--config", write(tmp_path, "model: m\n")], {})["model"] == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1\n", "unknown key prot in"),
        ("prot: 1\n", "did you mean port?"),
        ("port: eight\n", "port in "),
        ("port: 1\nport: 2\n", "port appears twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "max_num_seqs appears twice"),
        ("- port\n", "must be a mapping of flag names to values"),
        ("seed: 1\nport: [\n", "is not valid YAML: line 3: while parsing a flow node, expected the node content"),
        ("port: \x07\n", "is not valid YAML: character U+0007 at position 6 is not allowed"),
        ("decode-context-parallel-size: 4\n", "decode-context-parallel-size: 4 in "),
        ("enable_lora: true\n", "flags.yaml is not supported yet; leave it out"),
        ("enable-prefix-caching: maybe\n", "must be true or false"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_flags(["--config", write(tmp_path, text)], {})
    assert message in raised.value.message
    assert "\n" not in raised.value.message
    assert "<unicode string>" not in raised.value.message


def test_a_wrong_value_in_the_file_is_an_error_even_if_overridden(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"port in .* must be"):
        read_flags(["--port", "1", "--config", write(tmp_path, "port: -3\n")], {})


def test_missing_file_and_two_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read --config .*No such file"):
        read_flags(["--config", str(tmp_path / "none.yaml")], {})
    with pytest.raises(ConfigError, match="merge the files"):
        read_flags(["--config", "a", "--config", "b"], {})


@pytest.mark.parametrize(
    ("environment", "key", "value"),
    [
        ({"VLLM_API_KEY": "a,b"}, "api_key", ("a", "b")),
        ({"TOKENMILL_API_KEY": "t", "VLLM_API_KEY": "v"}, "api_key", ("t",)),
        ({"VLLM_LOGGING_LEVEL": "debug"}, "log_level", "DEBUG"),
        ({"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"}, "attention_backend", "triton-attn"),
        ({"TOKENMILL_ATTENTION_BACKEND": "auto", "VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}, "attention_backend", "auto"),
        ({"VLLM_LOG_STATS_INTERVAL": "2.5"}, "log_stats_interval", 2.5),
        ({"VLLM_CPU_KVCACHE_SPACE": "4"}, "kv_cache_memory_bytes", 4 * 2**30),
        ({"TOKENMILL_ENFORCE_EAGER": "1"}, "enforce_eager", True),
        ({"TOKENMILL_SERVED_MODEL_NAME": "a,b"}, "served_model_name", ("a", "b")),
    ],
)
def test_environment(environment: dict[str, str], key: str, value: object) -> None:
    assert read_flags([], environment)[key] == value


@pytest.mark.parametrize("name", ["TOKENMILL_PORT", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE"])
def test_empty_variables_count_as_unset(name: str) -> None:
    assert read_flags([], {name: ""}).given == {}


def test_variables_that_mean_nothing() -> None:
    """Kubernetes' service links, and vLLM's "no fixed cache"."""
    assert read_flags([], {"TOKENMILL_PORT": "tcp://10.0.0.1:8000", "VLLM_CPU_KVCACHE_SPACE": "0"}).given == {}


def test_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="TOKENMILL_PORT must be"):
        read_flags([], {"TOKENMILL_PORT": "http"})


def test_misspelt_variables_are_named_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    names = ["TOKENMILL_MAX_MODEL_LENGTH", "TOKENMILL_ZZZ", "TOKENMILL_CACHE_DIR", "TOKENMILL_LOGGING_LEVEL", "HOME"]
    links = ["TOKENMILL_SERVICE_HOST", "TOKENMILL_PORT_8000_TCP_ADDR", "TOKENMILL_API_SERVICE_PORT_HTTP"]
    with caplog.at_level(logging.WARNING):
        read_flags([], dict.fromkeys(names + links, "INFO") | {"TOKENMILL_GRPC_PORT": "tcp://10.0.0.1:1"})
    assert [record.getMessage() for record in caplog.records] == [
        "unknown variables without effect: TOKENMILL_MAX_MODEL_LENGTH (did you mean TOKENMILL_MAX_MODEL_LEN?), "
        "TOKENMILL_ZZZ"
    ]


def test_variables_of_flags_that_are_not_supported(caplog: pytest.LogCaptureFixture) -> None:
    assert read_flags([], {"TOKENMILL_DECODE_CONTEXT_PARALLEL_SIZE": "1", "TOKENMILL_ENABLE_LORA": "0"}).given == {}
    assert caplog.text == ""
    with pytest.raises(ConfigError, match="TOKENMILL_DECODE_CONTEXT_PARALLEL_SIZE=2 is not supported yet"):
        read_flags([], {"TOKENMILL_DECODE_CONTEXT_PARALLEL_SIZE": "2"})


@pytest.mark.parametrize("value", [True, False])
def test_trusting_remote_code_needs_nothing(caplog: pytest.LogCaptureFixture, value: bool) -> None:
    with caplog.at_level(logging.WARNING):
        offer_keywords(FlagValues(), {"trust_remote_code": value}, "LLM")
    said = "LLM(trust_remote_code=True) has no effect: supported models are native, no code of theirs is ever run"
    assert [record.getMessage() for record in caplog.records] == [said] * value


VLLM_VARIABLES = {
    "api_key": "VLLM_API_KEY",
    "log_level": "VLLM_LOGGING_LEVEL",
    "log_stats_interval": "VLLM_LOG_STATS_INTERVAL",
    "engine_stall_timeout": "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "media_loading_threads": "VLLM_MEDIA_LOADING_THREAD_COUNT",
    "image_fetch_timeout": "VLLM_IMAGE_FETCH_TIMEOUT",
    "video_fetch_timeout": "VLLM_VIDEO_FETCH_TIMEOUT",
    "max_media_bytes": "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB",
    "media_url_allow_redirects": "VLLM_MEDIA_URL_ALLOW_REDIRECTS",
    "kv_cache_memory_bytes": "VLLM_CPU_KVCACHE_SPACE",
}
"""Those that people set, and the flags that they mean."""
VLLM_VARIABLES_WITHOUT_EFFECT = (
    "CACHE_ROOT HOST_IP PORT WORKER_MULTIPROC_METHOD ENGINE_READY_TIMEOUT_S HTTP_TIMEOUT_KEEP_ALIVE BATCH_INVARIANT "
    "SERVER_DEV_MODE ALLOW_RUNTIME_LORA_UPDATING ALLOW_LONG_MAX_MODEL_LEN NO_USAGE_STATS MAX_STOP_STRINGS "
    "MAX_N_SEQUENCES AUDIO_FETCH_TIMEOUT CPU_OMP_THREADS_BIND USE_RUST_FRONTEND USE_MODELSCOPE "
    "REGEX_COMPILATION_TIMEOUT_S USE_V1"
)


@pytest.mark.parametrize(("key", "name"), VLLM_VARIABLES.items())
def test_variables_of_vllm_that_mean_a_flag(caplog: pytest.LogCaptureFixture, key: str, name: str) -> None:
    texts = {"log_level": "DEBUG", "media_url_allow_redirects": "0"}
    assert read_flags([], {name: texts.get(key, "7")})[key] != read_flags([], {})[key]
    assert caplog.text == ""


@pytest.mark.parametrize("name", VLLM_VARIABLES_WITHOUT_EFFECT.split())
def test_variables_of_vllm_without_effect_say_why(caplog: pytest.LogCaptureFixture, name: str) -> None:
    with caplog.at_level(logging.WARNING):
        read_flags([], {f"VLLM_{name}": "77"})
    assert f"VLLM_{name} has no effect: " in caplog.text


def test_variables_of_vllm_that_nobody_knows_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """And none that ask for what happens anyway, are empty, or are set by Kubernetes for a service."""
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "0",
        "VLLM_EMPTY": "",
        "VLLM_PORT": "tcp://10.0.0.1:80",
    }
    with caplog.at_level(logging.WARNING):
        read_flags([], {"VLLM_TARGET_DEVICE": "cpu", "VLLM_A": "b", "VLLM_SERVICE_HOST": "10.0.0.1", **quiet})
    said = "variables of vLLM without effect: VLLM_A, VLLM_TARGET_DEVICE"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_keywords(tmp_path: Path) -> None:
    values = FlagValues()
    offer_keywords(
        values, {"model": tmp_path, "max_model_len": "1K", "decode_context_parallel_size": 1, "dtype": None}, "LLM"
    )
    assert (values["model"], values["max_model_len"]) == (str(tmp_path), 1024)
    assert not values.is_given("dtype")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_model_length": 1}, r"unknown argument LLM\(max_model_length=...\); did you mean max_model_len\?"),
        (
            {"decode_context_parallel_size": 2},
            r"LLM\(decode_context_parallel_size=2\) is not supported yet \(only 1 is\)",
        ),
        ({"enable_lora": True}, r"LLM\(enable_lora=True\) is not supported yet; leave it out"),
        ({"quantization": "awq"}, r"LLM\(quantization='awq'\) is not supported yet"),
        ({"port": 1}, "about serving over HTTP"),
        ({"block_size": "big"}, r"LLM\(block_size=...\) must be"),
    ],
)
def test_mistakes_in_keywords(keywords: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offer_keywords(FlagValues(), keywords, "LLM")
