"""Loading for one of several workers: it gets its rows and columns of every tensor, and reads no others."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors.torch import save_file

from tests.engine_core.models.test_gguf_models import READABLE, mixed_type, write_one_tensor
from tests.support.model_loading import CPU, loaded_weights, model_config
from tests.support.thread_group import ThreadGroup, thread_groups
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import Family, make_tiny_model, tiny_config, tiny_weights
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.layers.placement import Share, whole
from tokenmill_engine.models import weights as weights_module
from tokenmill_engine.models.lanes import Lane
from tokenmill_engine.models.loader import build_model, load_weights
from tokenmill_engine.models.part_source import PartSource
from tokenmill_engine.models.weights import GGUFSource, SafetensorsSource

SHAPE: dict[str, Any] = {
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 192,
    "vocab_size": 510,
    "num_hidden_layers": 2,
}
SIZE = 4
"""Six query heads to a key-value head, which two workers share; 128, 128, 128 and 126 entries of the vocabulary."""


def part_of(name: str, values: torch.Tensor, rank: int) -> torch.Tensor:
    """What worker `rank` of 4 has of a tensor of this model, spelled out."""
    kind = name.split(".")[-2]
    match kind:
        case "q_proj":
            return values[24 * rank : 24 * (rank + 1)]
        case "k_proj" | "v_proj":
            return values[8 * (rank // 2) : 8 * (rank // 2 + 1)]
        case "gate_proj" | "up_proj":
            return values[48 * rank : 48 * (rank + 1)]
        case "o_proj" | "down_proj" if values.ndim == 2:
            width = {"o_proj": 24, "down_proj": 48}[kind]
            return values[:, width * rank : width * (rank + 1)]
        case "embed_tokens" | "lm_head":
            return values[128 * rank : 128 * (rank + 1)]
        case _:
            return values


def loaded_part(config: ModelConfig, group: ThreadGroup) -> dict[str, torch.Tensor]:
    model = build_model(config, CPU, group=group)
    load_weights(model, config)
    return {name: target.view for name, target in model.targets().items()}


def check_parts(config: ModelConfig, stored: dict[str, torch.Tensor]) -> None:
    for group in thread_groups(SIZE):
        parts = loaded_part(config, group)
        assert parts.keys() == stored.keys()
        for name, part in parts.items():
            assert torch.equal(part, part_of(name, stored[name], group.rank).to(part.dtype)), (name, group.rank)


def tiny(folder: Path, family: Family) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with a model, and its weights."""
    overrides = SHAPE | ({"attention_bias": True, "mlp_bias": True} if family == "llama" else {})
    config = tiny_config(family, **overrides)
    stored = {name: torch.from_numpy(values) for name, values in tiny_weights(config).items()}
    return make_tiny_model(folder, family, **overrides), stored


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_parts_of_safetensors(tmp_path: Path, family: Family, dtype: str) -> None:
    folder, stored = tiny(tmp_path / "model", family)
    check_parts(model_config(folder, dtype=dtype), stored)


def test_parts_of_a_checkpoint_of_another_type(tmp_path: Path) -> None:
    folder, stored = tiny(tmp_path / "model", "llama")
    halves = {name: values.to(torch.bfloat16) for name, values in stored.items()}
    save_file(halves, folder / "model.safetensors")
    check_parts(model_config(folder), {name: values.float() for name, values in halves.items()})
    check_parts(model_config(folder, dtype="bfloat16"), halves)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_gguf_with_interleaved_rows_and_blocks_that_a_part_cuts(
    tmp_path: Path, family: Family, dtype: str
) -> None:
    """Columns 24 to 48 of the attention's output and 48 to 96 of the MLP's lie across blocks of 32."""
    config = tiny_config(family, **SHAPE)
    file = tmp_path / "model.gguf"
    stored = write_tiny_gguf(file, config, tiny_weights(config), mixed_type)
    check_parts(
        model_config(file, dtype=dtype), {name: torch.from_numpy(values.copy()) for name, values in stored.items()}
    )


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_all_parts_together_are_the_whole(tmp_path: Path, load_format: str) -> None:
    folder, _ = tiny(tmp_path / "model", "qwen2")
    config = model_config(folder, load_format=load_format, seed=3)
    check_parts(config, loaded_weights(folder, CPU, load_format=load_format, seed=3))


def test_tied_heads_have_one_part_of_the_vocabulary(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama", **SHAPE, tie_word_embeddings=True)
    check_parts(model_config(folder), loaded_weights(folder, CPU))


def test_shapes_are_checked_against_the_whole_tensors(tmp_path: Path) -> None:
    folder, stored = tiny(tmp_path / "model", "llama")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(stored | {name: stored[name][:, :48].contiguous()}, folder / "model.safetensors")
    config = model_config(folder)
    model = build_model(config, CPU, group=thread_groups(SIZE)[0])
    with pytest.raises(ConfigError, match=rf"wrong shape: {name} is \[64, 48\], expected \[64, 192\]"):
        load_weights(model, config)


class _Reads:
    """Bytes that are read from files, by an `os.preadv` that counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        preadv = os.preadv

        def counting(descriptor: int, buffers: Iterable[Any], offset: int) -> int:
            got = preadv(descriptor, list(buffers), offset)
            self.num_bytes += got
            return got

        monkeypatch.setattr(weights_module.os, "preadv", counting)


def test_a_worker_reads_its_part_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = tiny(tmp_path / "model", "llama")
    reads = _Reads(monkeypatch)
    monkeypatch.setattr("tokenmill_engine.models.loader._MAX_THREADS", 1)  # so that the count is exact
    for group in thread_groups(SIZE):
        before = reads.num_bytes
        parts = loaded_part(model_config(folder, dtype="bfloat16"), group)
        assert reads.num_bytes - before == 4 * sum(part.numel() for part in parts.values())


@pytest.mark.parametrize("name", READABLE)
def test_columns_of_every_gguf_type(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    expected = quants.dequantize(write_one_tensor(tmp_path / "one.gguf", kind), kind)
    source = GGUFSource(tmp_path / "one.gguf")
    try:
        for columns in (range(100, 300), range(256, 512), range(32), range(511, 512)):
            buffer = torch.empty(3 * len(columns) * source.dtype("weight").itemsize, dtype=torch.uint8)
            values = source.read_columns("weight", range(2, 5), columns, buffer)
            assert values.dtype == source.dtype("weight")
            ours = values.float().view(3, -1).numpy()
            np.testing.assert_array_equal(ours, expected[2:5, columns.start : columns.stop])
    finally:
        source.close()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "part", [(Share(2, 3, 12), whole(10)), (whole(12), Share(4, 3, 10)), (Share(2, 3, 12), Share(4, 3, 10))]
)
def test_lanes_carry_parts(tmp_path: Path, part: tuple[Share, Share], dtype: torch.dtype, staged: bool) -> None:
    values = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    save_file({"w": values, "b": values[0].clone()}, tmp_path / "model.safetensors")
    rows, columns = part
    source = PartSource(SafetensorsSource(tmp_path), {"w": ("w", part), "b": ("b", (columns,))})
    assert source.shapes == {"w": (rows.count, columns.count), "b": (columns.count,)}
    lane = Lane(CPU, 512, staged=staged)
    matrix, vector = torch.zeros(rows.count, columns.count, dtype=dtype), torch.zeros(columns.count, dtype=dtype)
    for first in range(0, rows.count, 2):
        lane.copy(source, "w", first * columns.count, matrix[first : first + 2])
    lane.copy(source, "b", 0, vector)
    lane.finish()
    source.close()
    expected = values[rows.first : rows.first + rows.count, columns.first : columns.first + columns.count]
    assert torch.equal(matrix, expected.to(dtype))
    assert torch.equal(vector, values[0, columns.first : columns.first + columns.count].to(dtype))
