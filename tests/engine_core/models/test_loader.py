"""Weight loading: formats, sharding, types, and errors that name what is wrong."""

import io
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file

from tests.support.model_loading import CPU, load_on_cpu, loaded_weights
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import cached_tiny_model, make_tiny_model
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.dense_decoder import DenseDecoder

TOKENS = list(range(3, 40))


def logits_of(model: DenseDecoder) -> torch.Tensor:
    return PagedForward(model).step([("a", TOKENS)])["a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of its own, to break."""
    return make_tiny_model(tmp_path / "model", "llama")


def test_every_weight_arrives_unchanged(folder: Path) -> None:
    targets = loaded_weights(folder, CPU)
    stored = load_file(folder / "model.safetensors")
    assert set(targets) == set(stored)
    for name, values in stored.items():
        np.testing.assert_array_equal(targets[name].numpy(), values, err_msg=name)


def test_a_folder_that_transformers_saved_in_shards_loads_the_same(folder: Path, tmp_path: Path) -> None:
    import transformers

    sharded = tmp_path / "sharded"
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="60KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    assert not (sharded / "model.safetensors").exists()
    torch.testing.assert_close(logits_of(load_on_cpu(sharded)), logits_of(load_on_cpu(folder)), atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_checkpoints_of_other_float_types_are_converted(folder: Path, dtype: torch.dtype) -> None:
    weights = {
        name: torch.from_numpy(values).to(dtype) for name, values in load_file(folder / "model.safetensors").items()
    }
    save_torch_file(weights, folder / "model.safetensors")
    targets = loaded_weights(folder, CPU)
    for name, values in weights.items():
        torch.testing.assert_close(targets[name], values.float(), atol=0, rtol=0)


def test_dummy_weights_need_no_files_and_follow_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, again, other = (logits_of(load_on_cpu(folder, load_format="dummy", seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.isfinite(first).all()
    assert first.std() > 0.1


def test_a_tied_head_in_the_checkpoint_is_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tied", "llama", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    expected = logits_of(load_on_cpu(folder))
    save_file(weights | {"lm_head.weight": np.zeros((512, 64), np.float32)}, folder / "model.safetensors")
    assert torch.equal(logits_of(load_on_cpu(folder)), expected)


def test_old_checkpoints_may_carry_rotary_frequencies(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    save_file(weights | extra, folder / "model.safetensors")
    assert torch.isfinite(logits_of(load_on_cpu(folder))).all()


def test_a_missing_tensor_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks 1 tensor.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load_on_cpu(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.layers.7.extra.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 tensor.*does not know.*model\.layers\.7\.extra\.weight"):
        load_on_cpu(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"model.norm.weight": np.zeros(65, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \[65\], expected \[64\]"):
        load_on_cpu(folder)


def test_quantized_tensors_are_refused_by_type(folder: Path) -> None:
    weights = {name: torch.from_numpy(values) for name, values in load_file(folder / "model.safetensors").items()}
    weights["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)
    save_torch_file(weights, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has type I8"):
        load_on_cpu(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors is truncated.*download it again"):
        load_on_cpu(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"missing file.*model-00002-of-00002\.safetensors"):
        load_on_cpu(folder)


def test_progress_is_shown_at_info_level(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with caplog.at_level(logging.INFO):
        load_on_cpu(cached_tiny_model("llama"))
    assert "loading weights: 100%" in stderr.getvalue()
    assert any("LlamaForCausalLM" in record.getMessage() for record in caplog.records)


def test_nothing_is_shown_below_info_level_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    load_on_cpu(cached_tiny_model("llama"))
    assert stderr.getvalue() == ""


def test_the_number_of_torch_threads_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    load_on_cpu(cached_tiny_model("llama"))
    assert torch.get_num_threads() == before
