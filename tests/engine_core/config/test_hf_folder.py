"""Hugging Face folders: every spelling of a configuration, tokens and templates, safetensors headers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.tiny_models import Family, make_tiny_model, tiny_config
from tokenmill_engine.config.architecture import ArchitectureConfig, RopeConfig
from tokenmill_engine.config.hf_folder import (
    list_safetensors,
    parse_architecture,
    read_chat_template,
    read_eos_token_ids,
    read_generation_defaults,
    read_safetensors_header,
    read_special_tokens,
)
from tokenmill_engine.errors import ConfigError


def parse(family: Family, **overrides: Any) -> ArchitectureConfig:
    return parse_architecture(tiny_config(family, **overrides), "config.json")


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


# --- architecture -------------------------------------------------------------------------------------------------


def test_the_shape_is_read() -> None:
    architecture = parse("llama", num_hidden_layers=2)
    assert architecture == ArchitectureConfig(
        name="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=1024,
        rope=RopeConfig(theta=10000.0),
        layer_windows=(None, None),
        tie_word_embeddings=False,
        checkpoint_dtype="float32",
    )


def test_absent_keys_have_the_defaults_of_their_family() -> None:
    config = tiny_config("llama")
    for key in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings", "torch_dtype", "rms_norm_eps"):
        del config[key]
    architecture = parse_architecture(config, "config.json")
    assert (architecture.num_kv_heads, architecture.head_dim) == (4, 16)
    assert architecture.rope.theta == 10000.0
    assert architecture.rms_norm_eps == 1e-6
    assert not architecture.tie_word_embeddings
    assert architecture.checkpoint_dtype == "bfloat16"


def test_biases_and_norms_follow_the_family() -> None:
    flags = {
        family: (parsed.qkv_bias, parsed.output_bias, parsed.mlp_bias, parsed.qk_norm)
        for family in ("llama", "mistral", "qwen2", "qwen3")
        for parsed in [parse(family)]
    }
    assert flags == {
        "llama": (False, False, False, False),
        "mistral": (False, False, False, False),
        "qwen2": (True, False, False, False),
        "qwen3": (False, False, False, True),
    }
    biased = parse("llama", attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {"sliding_window": 8}, (None, None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8, 8)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        ("qwen2", {"sliding_window": 8}, (None, None, None)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 8)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True}, (None, None, None)),
        (
            "qwen3",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ("qwen3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, (None, None, None)),
    ],
)
def test_sliding_windows_follow_the_family(
    family: Family, overrides: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse(family, **overrides).layer_windows == windows


def test_mistral_without_the_key_slides_over_4096_tokens() -> None:
    config = tiny_config("mistral")
    del config["sliding_window"]
    assert parse_architecture(config, "config.json").layer_windows == (4096, 4096, 4096)


@pytest.mark.parametrize(("key", "value"), [("torch_dtype", "float16"), ("dtype", "float16")])
def test_both_spellings_of_the_dtype(key: str, value: str) -> None:
    config = tiny_config("llama")
    del config["torch_dtype"]
    assert parse_architecture(config | {key: value}, "config.json").checkpoint_dtype == "float16"


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
    ],
    ids=["rope_scaling", "rope_parameters"],
)
def test_llama3_scaling_in_both_spellings(spelling: dict[str, Any]) -> None:
    architecture = parse("llama", **spelling)
    assert architecture.rope == RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, original_max_position=256, low_freq_factor=1.0, high_freq_factor=4.0
    )
    assert architecture.max_position_embeddings == 1024


def test_linear_scaling_extends_the_positions() -> None:
    architecture = parse("llama", rope_scaling={"type": "linear", "factor": 4.0})
    assert (architecture.rope.kind, architecture.rope.factor) == ("linear", 4.0)
    assert architecture.max_position_embeddings == 4096


def test_yarn_scaling_extends_the_original_positions() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    architecture = parse("qwen2", rope_scaling=scaling, max_position_embeddings=512)
    assert architecture.rope == RopeConfig(theta=10000.0, kind="yarn", factor=4.0, original_max_position=512)
    assert architecture.max_position_embeddings == 2048
    assert parse("qwen2", rope_scaling=scaling, max_position_embeddings=2048).max_position_embeddings == 2048
    assert parse("qwen2", rope_scaling=scaling | {"attention_factor": 1.5}).rope.attention_factor == 1.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM; supported architectures: LlamaForCausalLM,"),
        ({"architectures": ["MixtralModel"]}, "LlamaModel, MistralModel, Qwen2Model, Qwen3Model, BertModel,"),
        ({"architectures": None}, "no architecture"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized checkpoints .awq. are not supported"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"num_attention_heads": "four"}, "num_attention_heads must be a positive integer, not 'four'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; supported: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs a positive factor, not None"),
        ({"rope_scaling": "linear"}, "is malformed"),
        ({"rms_norm_eps": "small"}, "is malformed"),
    ],
)
def test_unusable_configurations_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse("llama", **overrides)
    assert caught.value.message.startswith("config.json")
    assert "\n" not in caught.value.message


# --- tokens, templates, defaults ----------------------------------------------------------------------------------


def test_generation_defaults_use_our_names(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == {}
    write(
        tmp_path / "generation_config.json",
        {"temperature": 0.7, "top_k": 20, "top_p": None, "max_new_tokens": 99, "do_sample": True, "eos_token_id": 7},
    )
    assert read_generation_defaults(tmp_path) == {"temperature": 0.7, "top_k": 20, "max_tokens": 99}


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_eos", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 9}, 6, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": 9}, 7, (5, 7)),
        ({}, {"eos_token_id": 9}, None, (9,)),
        ({}, {"eos_token_id": [9, 8]}, 9, (9, 8)),
        ({}, {}, 3, (3,)),
        ({}, {}, None, ()),
    ],
)
def test_end_tokens_are_gathered_from_all_files(
    tmp_path: Path, generation: Any, config: Any, tokenizer_eos: int | None, expected: tuple[int, ...]
) -> None:
    write(tmp_path / "generation_config.json", generation)
    assert read_eos_token_ids(config, tmp_path, tokenizer_eos) == expected


def test_special_tokens_may_be_text_or_objects(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer.json", {"added_tokens": [{"id": 11, "content": "<e>"}, {"id": 12, "content": "<f>"}]})
    write(tmp_path / "tokenizer_config.json", {"bos_token": {"content": "<s>"}, "eos_token": "<f>"})
    special = read_special_tokens(tmp_path)
    assert (special.bos_token, special.eos_token, special.eos_token_id) == ("<s>", "<f>", 12)
    decoder = {"13": {"content": "<f>"}}
    write(tmp_path / "tokenizer_config.json", {"bos_token": None, "eos_token": "<f>", "added_tokens_decoder": decoder})
    special = read_special_tokens(tmp_path)
    assert (special.bos_token, special.eos_token, special.eos_token_id) == (None, "<f>", 13)


def test_chat_templates_are_found_in_every_place(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert read_chat_template(tmp_path) == "{% if tools %}tools{% else %}plain{% endif %}"
    write(tmp_path / "tokenizer_config.json", {"chat_template": named[:1]})
    assert read_chat_template(tmp_path) == "tools"
    write(tmp_path / "tokenizer_config.json", {"chat_template": "one"})
    assert read_chat_template(tmp_path) == "one"
    write(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert read_chat_template(tmp_path) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja {{ 'é' }}", encoding="utf-8")
    assert read_chat_template(tmp_path) == "jinja {{ 'é' }}"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{%- set a = 1 %}tools {{ a }}\n")
    assert read_chat_template(tmp_path) == (
        "{% if tools %}{%- set a = 1 %}tools {{ a }}{% else %}jinja {{ 'é' }}{% endif %}"
    )


@pytest.mark.parametrize("content", ["{", "[1]", "\x00"])
def test_broken_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_generation_defaults(tmp_path)


# --- safetensors --------------------------------------------------------------------------------------------------


def test_headers_say_where_tensors_lie(tmp_path: Path) -> None:
    weights = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.float16)}
    path = tmp_path / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    content = path.read_bytes()
    entries = {entry.name: entry for entry in read_safetensors_header(path)}
    assert set(entries) == {"a", "b"}
    assert (entries["a"].shape, entries["a"].dtype, entries["b"].dtype) == ((2, 3), "F32", "F16")
    for name, values in weights.items():
        entry = entries[name]
        assert content[entry.offset : entry.offset + entry.nbytes] == values.tobytes()


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros((20, 30), np.float32), "b": np.zeros(7, np.float32)}, path)
    content = path.read_bytes()
    for length in [0, 1, 7, 8, 9, len(content) - 1, *random.Random(0).sample(range(len(content)), 30)]:
        path.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"model\.safetensors is truncated"):
            read_safetensors_header(path)


def test_other_content_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for header in (b"not json", b"[1, 2]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(ConfigError, match=r"model\.safetensors is (not a safetensors file|damaged)"):
            read_safetensors_header(path)


def test_shards_come_from_the_index_the_single_file_or_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors files"):
        list_safetensors(tmp_path)
    for name in ("x.safetensors", "y.safetensors"):
        (tmp_path / name).touch()
    assert [path.name for path in list_safetensors(tmp_path)] == ["x.safetensors", "y.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert [path.name for path in list_safetensors(tmp_path)] == ["model.safetensors"]
    index = tmp_path / "model.safetensors.index.json"
    write(index, {"weight_map": {"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"}})
    assert [path.name for path in list_safetensors(tmp_path)] == ["x.safetensors", "y.safetensors"]
    write(index, {"weight_map": {}})
    with pytest.raises(ConfigError, match="has no weight_map"):
        list_safetensors(tmp_path)


def test_a_config_written_by_transformers_reads_as_the_hand_written_one(tmp_path: Path) -> None:
    import transformers

    folder = make_tiny_model(tmp_path / "ours", "qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=1)
    transformers.AutoConfig.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        parse_architecture(json.loads((place / "config.json").read_text()), "config.json")
        for place in (folder, tmp_path / "theirs")
    )
    assert ours == theirs
    assert ours.layer_windows == (None, 8, 8)
