"""Every flag changes something that a user can see. Each server here has many flags set; each test looks at one.

The counterpart is `tiny_server`, which has the defaults. Flags of the listening address, the end and the processes
are tried in other files of this folder.
"""

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.ports import free_port
from tests.support.server import PATIENCE_S, Server, check_error, start_server, wait_for
from tests.support.streams import BackgroundStream, read_stream
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import SPECIAL_TOKENS, TURN_END, TURN_START, tiny_config, tiny_weights, write_tokenizer

pytestmark = pytest.mark.slow

KEY = {"Authorization": "Bearer second"}
MAX_LEN = 8192
NUM_BLOCKS = 2 * MAX_LEN // 8
"""Of the other server, which runs two requests at a time, even long ones."""
ENDLESS = 8000
"""Tokens: whoever is left before they are generated has not ended by itself."""
GREETING_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}!"


@pytest.fixture(scope="module")
def other(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Whatever can be set without getting in the way of the rest, half of it in a file."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "template.jinja").write_text(GREETING_TEMPLATE)
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    (folder / "flags.yaml").write_text(
        f"served-model-name: [first, second]\nmax_model_len: {MAX_LEN}\nblock-size: 8\nenable-prefix-caching: false\n"
        f"max-num-seqs: 2\nscheduling-policy: priority\nchat-template: {folder}/template.jinja\nlog-level: INFO\n"
    )
    flags = ["--config", str(folder / "flags.yaml"), "--device", "cpu", "--dtype", "float32"]
    flags += ["--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-batched-tokens", "32", "--stream-interval", "5"]
    flags += ["--generation-config", str(folder), "--log-level", "debug", "--metrics-namespace", "vllm,tokenmill"]
    flags += ["--log-stats-interval", "0.5", "--no-async-scheduling", "--max-logprobs", "3", "--enforce-eager"]
    flags += ["--api-key", "first", "--api-key", "second"]
    with start_server(str(tiny_model), *flags) as server:
        server.http.headers.update(KEY)
        yield server


def test_device_auto_falls_back_to_the_cpu(tiny_model: Path) -> None:
    with start_server(str(tiny_model), *TINY_FLAGS[2:], "--device", "auto", env={"CUDA_VISIBLE_DEVICES": ""}) as server:
        assert "on cpu (float32)" in server.log


def test_served_model_names(other: Server) -> None:
    assert [model["id"] for model in other.http.get("/v1/models").json()["data"]] == ["first", "second"]
    assert [other.complete(model=name)["model"] for name in ("first", "second")] == ["first", "first"]
    assert check_error(other.post("/v1/completions", model="third", prompt="a"), 404)["code"] == "model_not_found"
    assert 'model_name="first"' in other.http.get("/metrics").text


def test_served_model_names_of_two_flags(tiny_model: Path) -> None:
    """The flag twice, once with two values; and a Unix socket to listen on."""
    names = ("--served-model-name", "a", "b", "--served-model-name", "c")
    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        path = f"{folder}/server.sock"
        _check_names_on_a_socket(path, str(tiny_model), *TINY_FLAGS, *names)
        assert not Path(path).exists()


def _check_names_on_a_socket(path: str, *flags: str) -> None:
    with start_server(*flags, "--uds", path) as server:
        assert server.url == f"unix://{path}"
        transport = httpx.HTTPTransport(uds=path)
        with httpx.Client(transport=transport, base_url="http://server") as client:
            assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["a", "b", "c"]
            for name in "abc":
                body = {"model": name, "prompt": "a", "max_tokens": 2}
                assert client.post("/v1/completions", json=body).status_code == 200
        assert server.stop() == 0


def test_api_keys(other: Server, tiny_server: Server) -> None:
    for key, status in (("first", 200), ("second", 200), ("third", 401), ("firs", 401)):
        response = httpx.get(f"{other.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, trust_env=False)
        assert response.status_code == status
    assert check_error(httpx.get(f"{other.url}/v1/models", trust_env=False), 401)["code"] == "invalid_api_key"
    assert httpx.get(f"{other.url}/health", trust_env=False).status_code == 200
    assert httpx.get(f"{tiny_server.url}/v1/models", trust_env=False).status_code == 200


def test_max_model_len(other: Server, tiny_server: Server) -> None:
    prompt = [7] * (MAX_LEN + 1)
    assert check_error(other.post("/v1/completions", prompt=prompt), 400)["code"] == "context_length_exceeded"
    assert other.http.get("/v1/models").json()["data"][0]["max_model_len"] == MAX_LEN
    assert tiny_server.complete(prompt)
    assert tiny_server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 65536


def test_max_model_len_auto_takes_what_the_pool_holds(tiny_model: Path) -> None:
    flags = (*TINY_FLAGS[:4], "--num-gpu-blocks-override", "10", "--max-model-len", "auto")
    with start_server(str(tiny_model), *flags) as server:
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 160


def test_kv_cache_sizes(other: Server, tiny_server: Server) -> None:
    """Block size and number of blocks, of --num-gpu-blocks-override there and --kv-cache-memory-bytes 64M here."""

    def info(server: Server) -> dict[str, str]:
        match = re.search(r"^tokenmill:cache_config_info\{(.*)\}", server.http.get("/metrics").text, re.MULTILINE)
        assert match is not None
        return dict(re.findall(r'(\w+)="([^"]*)"', match[1]))

    assert (info(other)["block_size"], info(other)["num_gpu_blocks"]) == ("8", str(NUM_BLOCKS))
    bytes_per_token = 3 * 2 * 2 * 16 * 4
    assert (info(tiny_server)["block_size"], info(tiny_server)["num_gpu_blocks"]) == (
        "16",
        str(64 * 2**20 // (16 * bytes_per_token)),
    )


def test_prefix_caching(other: Server, tiny_server: Server) -> None:
    prompt = [9, 8, 7, 6] * 12

    def cached(server: Server) -> int:
        server.complete(prompt)
        return int(server.complete(prompt)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(other) == 0
    assert cached(tiny_server) == 32


def test_max_num_seqs(other: Server, tiny_server: Server) -> None:
    for server, num_running in ((other, 2), (tiny_server, 6)):
        streams = [stream_of(server, prompt="a", max_tokens=ENDLESS) for _ in range(6)]
        wait_for_load(server, num_running, 6 - num_running)
        BackgroundStream.leave_all(streams)


def wait_for_load(server: Server, num_running: int, num_waiting: int) -> None:
    names = ("num_requests_running", "num_requests_waiting")
    expected = [num_running, num_waiting]
    wait_for(lambda: [server.metric(name) for name in names] == expected, PATIENCE_S, f"requests {expected}")


def test_max_num_batched_tokens(other: Server, tiny_server: Server) -> None:
    def steps_above_32(server: Server) -> float:
        server.complete([5] * 200)
        page = server.metrics()
        (steps,) = (value for key, value in page.items() if key.startswith("iteration_tokens_total_count"))
        (small,) = (v for k, v in page.items() if k.startswith("iteration_tokens_total_bucket") and "le=32.0" in k)
        return steps - small

    assert steps_above_32(other) == 0
    assert steps_above_32(tiny_server) > 0


def test_scheduling_policy(other: Server, tiny_server: Server) -> None:
    """Two long requests run; of those that wait the one with the lower number takes the first free place."""
    long = [stream_of(other, prompt="long", max_tokens=ENDLESS) for _ in range(2)]
    wait_for_load(other, 2, 0)
    late = stream_of(other, prompt="a", max_tokens=ENDLESS, priority=5)
    wait_for_load(other, 2, 1)
    early = stream_of(other, prompt="a", max_tokens=ENDLESS, priority=1)
    wait_for_load(other, 2, 2)
    long[0].leave()
    early.wait_for_events()
    assert late.stream.events == []
    BackgroundStream.leave_all([long[1], early, late])
    check_error(tiny_server.post("/v1/completions", prompt="a", priority=1), 400)


def stream_of(server: Server, **fields: Any) -> BackgroundStream:
    return BackgroundStream(server.url, "/v1/completions", headers=dict(KEY), ignore_eos=True, temperature=0, **fields)


def test_stream_interval(other: Server, tiny_server: Server) -> None:
    fields = {"prompt": "a", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    def num_chunks(server: Server) -> int:
        return len(read_stream(server.url, "/v1/completions", fields, headers=dict(KEY)).choices())

    assert num_chunks(other) <= 10
    assert num_chunks(tiny_server) >= 40


def test_chat_template(other: Server, tiny_server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    own, given = (server.post("/tokenize", messages=messages).json()["tokens"] for server in (tiny_server, other))
    assert given == other.post("/tokenize", prompt="Hello!", add_special_tokens=False).json()["tokens"]
    assert own != given


def test_generation_config(other: Server, tiny_server: Server) -> None:
    """Its temperature of 0 makes requests greedy that do not say otherwise."""

    def texts(server: Server) -> set[str]:
        return {server.text("a", max_tokens=20, temperature=None) for _ in range(3)}

    assert texts(other) == {other.text("a", max_tokens=20, temperature=0)}
    assert len(texts(tiny_server)) > 1


def test_max_logprobs(other: Server, tiny_server: Server) -> None:
    assert other.post("/v1/completions", prompt="a", max_tokens=1, logprobs=3).status_code == 200
    check_error(other.post("/v1/completions", prompt="a", max_tokens=1, logprobs=4), 400)
    assert tiny_server.post("/v1/completions", prompt="a", max_tokens=1, logprobs=4).status_code == 200


def test_log_level_and_file_precedence(other: Server, tiny_server: Server) -> None:
    """The file says INFO, the command line DEBUG."""
    assert re.search(r"^DEBUG ", other.log, re.MULTILINE)
    assert not re.search(r"^DEBUG ", tiny_server.log, re.MULTILINE)


def test_log_stats_interval(other: Server) -> None:
    count = other.log.count("generation throughput")
    wait_for(lambda: other.log.count("generation throughput") >= count + 2, PATIENCE_S, "two more stats lines")


def test_metrics_namespace(other: Server, tiny_server: Server) -> None:
    both, own = other.http.get("/metrics").text, tiny_server.http.get("/metrics").text
    for name in ("num_requests_running", "kv_cache_usage_perc", "time_to_first_token_seconds_count"):
        assert f"\ntokenmill:{name}{{" in both
        assert f"\nvllm:{name}{{" in both
        assert f"\ntokenmill:{name}{{" in own
    assert "vllm:" not in own


def test_async_scheduling(other: Server, tiny_server: Server) -> None:
    """A step ahead means one step too many after a stop that could not be foreseen; the text is the same."""
    token_ids = tiny_server.complete("a", max_tokens=30, ignore_eos=True, return_token_ids=True)["choices"][0][
        "token_ids"
    ]
    stop = next(token for position, token in enumerate(token_ids) if position > 5 and token not in token_ids[:position])

    def num_computed(server: Server) -> float:
        """Tokens so far. The answer to a request of known length comes when all steps before it are counted."""
        server.complete("a", max_tokens=1)
        return server.metric("iteration_tokens_total_sum")

    def run(server: Server) -> tuple[float, str]:
        before = num_computed(server)
        text = server.text("a", max_tokens=30, stop_token_ids=[stop], ignore_eos=True)
        return num_computed(server) - before, text

    (ahead, first), (in_step, second) = run(tiny_server), run(other)
    assert first == second
    assert ahead == in_step + 1


def test_enforce_eager(other: Server, tiny_server: Server) -> None:
    assert "layers run one by one" in other.log
    assert "layers run as one call" in tiny_server.log


def test_gpu_memory_utilization_is_not_dropped_in_silence(tiny_model: Path, tiny_server: Server) -> None:
    """On a GPU it sizes the KV cache, which tests/gpu checks; on a CPU it says what to use instead."""
    flags = (*TINY_FLAGS, "--gpu-memory-utilization", "0.5", "--disable-log-stats")
    with start_server(str(tiny_model), *flags) as server:
        assert "--gpu-memory-utilization has no effect on the CPU; use --kv-cache-memory-bytes" in server.log
        server.complete()
        assert "tokenmill:" not in server.http.get("/metrics").text
        assert "tokenmill:" in tiny_server.http.get("/metrics").text


def test_disable_log_stats(tiny_model: Path) -> None:
    """No stats line either, though the interval has passed. Listens on another address of this machine."""
    flags = (*TINY_FLAGS, "--disable-log-stats", "--log-stats-interval", "0.2", "--host", "127.0.0.2")
    with start_server(str(tiny_model), *flags, port=free_port()) as server:
        assert server.url.startswith("http://127.0.0.2:")
        server.complete(max_tokens=200, ignore_eos=True)
        server.complete(max_tokens=200, ignore_eos=True)
        assert "throughput" not in server.log
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url.replace("127.0.0.2", "127.0.0.1"), trust_env=False)


@pytest.fixture(scope="module")
def gguf_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The weights of `tiny_server` from a GGUF file, with a tokenizer from elsewhere and a key of the environment."""
    folder = tmp_path_factory.mktemp("gguf")
    config = tiny_config("llama")
    file = folder / "tiny.gguf"
    write_tiny_gguf(file, config, tiny_weights(config), lambda _: gguf.GGMLQuantizationType.F32)
    write_tokenizer(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("<|im_start|>", TURN_END))
    flags = (str(file), *TINY_FLAGS, "--load-format", "gguf", "--tokenizer", str(folder))
    with start_server(*flags, env={"VLLM_API_KEY": "second"}) as server:
        server.http.headers.update(KEY)
        yield server


def test_load_format_gguf(gguf_server: Server, tiny_server: Server) -> None:
    assert gguf_server.text("a", max_tokens=20) == tiny_server.text("a", max_tokens=20)


def test_tokenizer(gguf_server: Server, tiny_server: Server) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    first = [server.post("/tokenize", messages=messages).json()["tokens"][0] for server in (gguf_server, tiny_server)]
    assert first == [SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(TURN_START)]


def test_api_key_of_the_environment(gguf_server: Server) -> None:
    assert gguf_server.http.get("/v1/models").status_code == 200
    assert httpx.get(f"{gguf_server.url}/v1/models", trust_env=False).status_code == 401
