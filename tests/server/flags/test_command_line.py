import pytest

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import PromptLimits


def given(*arguments: str, **environment: str) -> dict[str, object]:
    values = read_flags(arguments, environment)
    return {key: values[key] for key in values.given}


def test_nothing_given() -> None:
    values = read_flags([], {})
    assert values.given == {}
    assert (values["port"], values["host"], values["enable_prefix_caching"]) == (8000, "127.0.0.1", True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["m"], {"model": "m"}),
        (["--model", "m"], {"model": "m"}),
        (["m", "--model", "m"], {"model": "m"}),
        (["--port", "1", "m", "-dp", "2"], {"model": "m", "port": 1, "data_parallel_size": 2}),
        (["--max_model_len", "32k"], {"max_model_len": 32000}),
        (["--max-model-len=-1"], {"max_model_len": "auto"}),
        (["--max-model-len", "-1"], {"max_model_len": "auto"}),
        (["-asc", "4"], {"api_server_count": 4}),
        (["-tp", "1"], {"tensor_parallel_size": 1}),
        (
            ["-pp", "2", "--pipeline-parallel-layers", "12, 18"],
            {
                "pipeline_parallel_size": 2,
                "pipeline_parallel_layers": (12, 18),
            },
        ),
        (["--tensor_parallel_size=2", "-dp", "3"], {"tensor_parallel_size": 2, "data_parallel_size": 3}),
        (["--distributed-executor-backend", "MP"], {"distributed_executor_backend": "mp"}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--enforce_eager"], {"enforce_eager": True}),
        (["--port", "1", "--port", "1"], {"port": 1}),
        (["--dtype", "half"], {"dtype": "float16"}),
        (["--api-key", "a", "--api-key", "b", "m"], {"api_key": ("a", "b"), "model": "m"}),
        (["--metrics-namespace", "vllm,tokenmill"], {"metrics_namespace": ("vllm", "tokenmill")}),
        (["--limit-mm-per-prompt.image", "2", "m"], {"model": "m", "limit_mm_per_prompt": PromptLimits(images=2)}),
        (
            ["--limit_mm_per_prompt.image=2", "m", "--limit-mm-per-prompt.video.count", "0"],
            {"model": "m", "limit_mm_per_prompt": PromptLimits(images=2, videos=0)},
        ),
        (
            ["--limit-mm-per-prompt", '{"image": 2}', "--limit-mm-per-prompt.image", "2"],
            {"limit_mm_per_prompt": PromptLimits(images=2)},
        ),
        (
            ["--mm-processor-kwargs.max_pixels", "20000"],
            {"mm_processor_kwargs": ProcessorKwargs(max_pixels=20000)},
        ),
    ],
)
def test_flags(arguments: list[str], expected: dict[str, object]) -> None:
    assert given(*arguments) == expected


def test_served_names_twice_and_several_at_once() -> None:
    names = given("--served-model-name", "a", "b", "--served-model-name", "c", "--port", "1")["served_model_name"]
    assert names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "1"], "unknown flag --prot; did you mean --port?"),
        (["--max-model-length=1"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--port"], "--port: expected one argument"),
        (["--port", "1", "--port", "2"], "--port is given with different values (1, 2); keep one"),
        (["--enforce-eager", "--no-enforce-eager"], "both --enforce-eager and --no-enforce-eager are given"),
        (["m", "--model", "n"], "two models are named, m and --model n; leave one out"),
        (["m", "n"], "unexpected argument 'n' after the model 'm'"),
        (["--api-key", "a", "b", "m"], "repeat --api-key for every key"),
        (["--seed", "-1"], "--seed must be a whole number"),
        (
            ["--gpu-memory-utilization", "90"],
            "--gpu-memory-utilization must be a number above 0 and at most 1; got '90'",
        ),
        (["--scheduling-policy", "lifo"], "must be one of fcfs, priority; got 'lifo'"),
        (["--max", "3"], "unknown flag --max"),
        (["--limit-mm-per-prompt.image"], "--limit-mm-per-prompt.image must be --limit-mm-per-prompt.MEMBER VALUE"),
        (["--limit-mm-per-prompt.", "2"], "must be --limit-mm-per-prompt.MEMBER VALUE"),
        (["--limit-mm-per-prompt.image", "x"], "--limit-mm-per-prompt must be how many images and videos"),
        (
            ["--limit-mm-per-prompt.image=1", "--limit_mm_per_prompt.image=2"],
            "--limit_mm_per_prompt.image is given with different values; keep one",
        ),
        (
            ["--media-io-kwargs.video", "1", "--media-io-kwargs.video.fps", "2"],
            "--media-io-kwargs.video.fps contradicts another value of 'video'; leave one out",
        ),
        (
            ["--limit-mm-per-prompt", '{"image": 2}', "--limit-mm-per-prompt.image", "1"],
            "--limit-mm-per-prompt is given with different values",
        ),
        (["--max-model-len.x", "3"], "unknown flag --max-model-len.x"),
    ],
)
def test_mistakes_name_the_fix(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_flags(arguments, {})
    assert message in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize(
    "arguments",
    [
        ["-pcp", "1"],
        ["--decode_context_parallel_size=1", "--data-parallel-backend", "mp"],
        ["--enable-chunked-prefill", "--no-enable-lora", "--kv-cache-dtype", "auto"],
        ["--trust-remote-code"],
        ["--quantization", "none", "--preemption-mode", "recompute", "--disable-log-requests"],
    ],
)
def test_vllm_flags_that_ask_for_what_happens_anyway_pass(arguments: list[str]) -> None:
    assert given(*arguments) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-dcp", "2"], "--decode-context-parallel-size 2 is not supported yet (only 1 is)"),
        (["--enable-lora"], "--enable-lora is not supported yet; leave it out"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill is not supported; prefill is always chunked"),
        (["--quantization", "squeezellm"], "--quantization squeezellm is not supported yet"),
        (
            ["--nnodes", "2"],
            "--nnodes 2 is not supported yet (only 1 is); for ranks on several machines start launchers",
        ),
        (["-sc", "{}"], "--speculative-config {} is not supported yet"),
        (["--speculative-config.method", "ngram"], '--speculative-config {"method": "ngram"} is not supported yet'),
        (["-O3"], "--optimization-level 3 is not supported yet"),
    ],
)
def test_other_vllm_flags_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_flags(arguments, {})
    assert message in raised.value.message
