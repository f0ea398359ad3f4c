"""A model whose layers lie in stages against the same model in one piece: the same bits, in float32 on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from tests.support.model_loading import CPU, load_op_by_op, model_config
from tests.support.paged_forward import PagedForward
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import Family, cached_tiny_model, make_tiny_model, tiny_config, tiny_weights
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.stages import Stage, share_layers
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.loader import build_model, load_weights

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-untied": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2-some-windows": ("qwen2", QWEN_WINDOW),
    "qwen3-tied-windows": ("qwen3", {"tie_word_embeddings": True, **QWEN_WINDOW}),
}
SPLITS = [(2, 1), (1, 2), (1, 1, 1)]
"""Of three layers."""

STEPS = [
    [("a", [7, 300, 12, 511, 0, 41, 170, 171, 255, 256, 9, 77, 5]), ("b", [3, 4])],
    [("a", [100]), ("b", [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]), ("c", [508, 3, 2])],
    [("a", [1]), ("b", [2]), ("c", [3])],
]
"""Prompts, chunks beside decodes, decodes."""


def load_stages(config: ModelConfig, split: tuple[int, ...]) -> list[DenseDecoder]:
    models = []
    for stage in share_layers(config.architecture.num_layers, len(split), split):
        model = build_model(config, CPU, stage=stage)
        load_weights(model, config)
        model.finalize()
        models.append(model)
    return models


class StagedForward:
    """`PagedForward` through the stages."""

    def __init__(self, models: list[DenseDecoder]) -> None:
        self._stages = [PagedForward(model, block_size=4) for model in models]

    def step(self, work: list[tuple[str, list[int]]]) -> dict[str, torch.Tensor]:
        ordered = sorted(work, key=lambda item: len(item[1]) != 1)
        stream = None
        for paged in self._stages[:-1]:
            stream = paged.model.run_layers(paged.prepare(ordered), paged.kv_caches, stream)
        last = self._stages[-1]
        hidden = last.model.forward(last.prepare(ordered), last.kv_caches, incoming=stream)
        pieces = last.model.compute_logits(hidden).split([len(tokens) for _, tokens in ordered])
        return {name: piece for (name, _), piece in zip(ordered, pieces, strict=True)}


def check_equal(source: Path, split: tuple[int, ...], **changes: Any) -> None:
    whole = PagedForward(load_op_by_op(source, **changes), block_size=4)
    staged = StagedForward(load_stages(model_config(source, **changes), split))
    for work in STEPS:
        expected, found = whole.step(work), staged.step(work)
        assert found.keys() == expected.keys()
        for name, logits in found.items():
            assert torch.equal(logits, expected[name])


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_the_whole_model(name: str, split: tuple[int, ...]) -> None:
    family, overrides = FAMILIES[name]
    check_equal(cached_tiny_model(family, **overrides), split)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_equals_the_whole_model_too(dtype: str) -> None:
    check_equal(cached_tiny_model("qwen3"), (1, 1, 1), dtype=dtype)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_gguf(tmp_path: Path, family: Family) -> None:
    config = tiny_config(family)
    write_tiny_gguf(tmp_path / "model.gguf", config, tiny_weights(config), lambda name: GGMLQuantizationType.Q8_0)
    check_equal(tmp_path / "model.gguf", (1, 2))


def test_random_weights_are_those_of_the_whole_model(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2")
    (folder / "model.safetensors").unlink()
    check_equal(folder, (1, 1, 1), load_format="dummy", seed=5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_has_its_layers_and_the_ends_have_theirs(tied: bool) -> None:
    config = model_config(cached_tiny_model("llama", tie_word_embeddings=tied))
    models = [build_model(config, CPU, stage=Stage(range(layer, layer + 1), 3)) for layer in range(3)]
    names = [set(model.targets()) for model in models]
    assert [len(model.kv_specs) for model in models] == [1, 1, 1]
    for layer, own in enumerate(names):
        assert {name.split(".")[2] for name in own if ".layers." in name} == {str(layer)}
    ends = [{name for name in own if ".layers." not in name} for own in names]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert ends == [{"model.embed_tokens.weight"}, set(), {"model.norm.weight", head}]
    whole = build_model(config, CPU)
    assert set(whole.targets()) == set().union(*names) == set(whole.parameter_names())
    assert all(model.parameter_names() == whole.parameter_names() for model in models)


def test_only_what_no_stage_knows_is_unexpected(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"model.layers.3.mlp.up_proj.weight": weights["model.norm.weight"]}, folder / "model.safetensors"
    )
    with pytest.raises(ConfigError, match=r"1 tensor\(s\) that its architecture does not know: model\.layers\.3"):
        load_stages(model_config(folder), (1, 2))


def test_a_stage_lacks_only_its_own_tensors(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    config = model_config(folder)
    first, last = (build_model(config, CPU, stage=stage) for stage in share_layers(3, 2))
    load_weights(first, config)
    with pytest.raises(ConfigError, match=r"lacks 1 tensor\(s\).*model\.layers\.2\.mlp\.up_proj"):
        load_weights(last, config)
