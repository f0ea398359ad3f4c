import dataclasses
import json
from pathlib import Path

import pytest

from tests.support.tiny_models import cached_tiny_model, tiny_config
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_server.bench.compare_memory import StepBytes, step_bytes


def test_bytes_of_a_step(tmp_path: Path) -> None:
    """3 layers of width 64 with 4 query heads and 2 of keys, 16 wide; 160 inside; 512 words."""
    layer = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 160 * 64 + 2 * 64
    architecture = resolve_model(str(cached_tiny_model("llama"))).architecture
    assert step_bytes(architecture, "bfloat16") == StepBytes(2 * (3 * layer + 64 + 512 * 64), 2 * 2 * 3 * 2 * 16)
    assert step_bytes(architecture, "float32") == StepBytes(4 * (3 * layer + 64 + 512 * 64), 4 * 2 * 3 * 2 * 16)
    tied = dataclasses.replace(architecture, tie_word_embeddings=True)
    assert step_bytes(tied, "bfloat16") == step_bytes(architecture, "bfloat16")
    assert step_bytes(architecture, "auto") is None


def test_an_8b_shape_has_the_bytes_that_were_counted_on_a_card(tmp_path: Path) -> None:
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", **shape)))
    read = step_bytes(resolve_model(str(tmp_path)).architecture, "bfloat16")
    assert read is not None
    assert read.weights == pytest.approx(15.01e9, rel=1e-3)
    assert read.per_token == 32 * 2 * 8 * 128 * 2


def test_share_of_the_bandwidth() -> None:
    read = StepBytes(weights=1_000_000_000, per_token=1000)
    assert read.bandwidth_share(1_000_000, step_s=0.5, num_devices=2, bandwidth_gb_s=4.0) == pytest.approx(0.5)
