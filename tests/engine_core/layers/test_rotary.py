"""Rotary tables against transformers' formulas and a few exact values."""

import math
from typing import Any

import pytest
import torch

from tests.support.tiny_models import tiny_config
from tokenmill_engine.config.architecture import RopeConfig
from tokenmill_engine.config.hf_folder import parse_architecture
from tokenmill_engine.layers.rotary import attention_factor, cos_sin_table

CPU = torch.device("cpu")

SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["default", "linear", "llama3", "yarn", "yarn-mscale"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_equal_those_of_transformers_far_out_too(scaling: dict[str, Any] | None, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    overrides = {
        "rope_scaling": scaling,
        "rope_theta": 500000.0,
        "head_dim": head_dim,
        "hidden_size": 4 * head_dim,
        "max_position_embeddings": 131072,
    }
    config = tiny_config("llama", **overrides)
    positions = torch.arange(60_000, 70_000, dtype=torch.int64)
    module = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = module(torch.zeros(1, dtype=torch.float32), positions[None])
    half = head_dim // 2
    expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
    ours = cos_sin_table(parse_architecture(config, "config.json").rope, head_dim, 70_000, CPU)[positions]
    assert ours.dtype == torch.float32
    # One unit in the last place of a frequency turns position 70 000 by up to 8e-5.
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_position_zero_does_not_rotate_and_position_one_turns_by_the_frequencies() -> None:
    table = cos_sin_table(RopeConfig(theta=10000.0), 4, 2, CPU)
    assert table[0].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert table[1].tolist() == pytest.approx([math.cos(1), math.cos(0.01), math.sin(1), math.sin(0.01)], abs=1e-7)


def test_only_the_rotary_dimensions_are_in_the_table() -> None:
    table = cos_sin_table(RopeConfig(rotary_dim=8), 32, 10, CPU)
    assert table.shape == (10, 8)
    torch.testing.assert_close(table, cos_sin_table(RopeConfig(), 8, 10, CPU))


def test_frequency_divisors_slow_their_dimensions() -> None:
    table = cos_sin_table(RopeConfig(freq_factors=(1.0, 2.0)), 4, 3, CPU)
    plain = cos_sin_table(RopeConfig(), 4, 3, CPU)
    torch.testing.assert_close(table[:, 0], plain[:, 0])
    torch.testing.assert_close(table[2, 1], plain[1, 1])


def test_yarns_factor_is_the_papers_unless_stated() -> None:
    assert attention_factor(RopeConfig(kind="yarn", factor=4.0)) == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert attention_factor(RopeConfig(kind="yarn", factor=4.0, attention_factor=1.25)) == 1.25
    assert attention_factor(RopeConfig(kind="llama3", factor=4.0)) == 1.0
