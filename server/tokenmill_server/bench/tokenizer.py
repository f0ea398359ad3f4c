"""Finds the tokenizer that makes and counts benchmark prompts."""

from pathlib import Path

from tokenizers import Tokenizer

from tokenmill_engine.config.gguf_file import is_gguf
from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME, embedded_model_path
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.vocabulary.gguf_tokenizer import load_gguf_tokenizer
from tokenmill_engine.vocabulary.hf_tokenizer import load_hf_tokenizer


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of the model called `name`: a folder, a GGUF file, a tokenizer.json, a hub id or the name of the
    embedded model.

    Raises: ConfigError.
    """
    path = embedded_model_path() if name == EMBEDDED_MODEL_NAME else Path(name)
    if path.is_file() and is_gguf(path):
        return load_gguf_tokenizer(str(path))
    if path.exists():
        return load_hf_tokenizer(path if path.is_dir() else path.parent)
    try:
        return Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"no tokenizer found for {name!r} ({error}); name one with --tokenizer FOLDER, or send token ids: "
            "--prompt-format ids --vocab-size N"
        ) from None
