"""Folders of other sizes for dummy weights: `benchmarks/shapes.py`."""

import json
from pathlib import Path

import pytest

from benchmarks.shapes import make_shape
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_engine.config.parallel import tensor_parallel_sizes


def test_the_shape_of_70b(tmp_path: Path) -> None:
    """Its published number of parameters is 70.6e9."""
    folder = cached_tiny_model("llama", vocab_size=128256, rope_theta=500000.0)
    made = make_shape("70b", folder, tmp_path / "70b")
    architecture = resolve_model(str(made)).architecture
    assert architecture.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    assert architecture.rope.theta == 500000.0
    assert {2, 4, 8} <= set(tensor_parallel_sizes(architecture))


def test_a_tiny_one_has_the_tokenizer_and_no_weights(tmp_path: Path) -> None:
    folder = cached_tiny_model("llama")
    made = make_shape("tiny", folder, tmp_path / "tiny")
    assert {path.name for path in made.iterdir()} == {path.name for path in folder.glob("*.json")}
    assert (made / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    kept = json.loads((folder / "config.json").read_text())
    changed = json.loads((made / "config.json").read_text())
    assert (changed["vocab_size"], changed["rms_norm_eps"]) == (kept["vocab_size"], kept["rms_norm_eps"])
    assert {1, 2, 4} <= set(tensor_parallel_sizes(resolve_model(str(made)).architecture))
