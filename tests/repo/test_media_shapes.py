"""Folders of models that look at images, for dummy weights: `benchmarks/media_shapes.py`."""

import json
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoConfig, AutoTokenizer

from benchmarks.media_shapes import SHAPES, make_media_shape
from tokenmill_engine.config.model_files import resolve_model
from tokenmill_server.processing.tokenizer import load_tokenizer


def test_the_shape_of_7b(tmp_path: Path) -> None:
    """Its published number of parameters is 8.29e9, with the encoder."""
    files = resolve_model(str(make_media_shape("vl7b", tmp_path / "vl7b")))
    assert files.media is not None
    total = files.architecture.num_parameters + files.media.vision.num_parameters
    assert total == pytest.approx(8.29e9, rel=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_reads_it_too(shape: str, tmp_path: Path) -> None:
    folder = str(make_media_shape(shape, tmp_path / shape))
    files, theirs = resolve_model(folder), AutoConfig.from_pretrained(folder)
    assert files.media is not None
    assert files.media.image_token_id == theirs.image_token_id
    assert files.architecture.vocab_size == theirs.text_config.vocab_size
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    text = "Zwei Bilder? <|vision_start|><|image_pad|><|vision_end|> Ja, à la carte.\n"
    assert tokenizer(text)["input_ids"] == list(ours.encode(text))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # Whatever is sampled has a text.
    assert all(tokenizer.decode([token_id]) for token_id in range(0, len(tokenizer), 997))


def test_a_chat_has_the_placeholder_of_an_image(tmp_path: Path) -> None:
    folder = make_media_shape("tiny", tmp_path / "tiny")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Look: "}, {"type": "image"}]}]
    prompt = ImmutableSandboxedEnvironment().from_string(template).render(messages=messages, add_generation_prompt=True)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert prompt == f"<|im_start|>user\nLook: {image}<|im_end|>\n<|im_start|>assistant\n"
