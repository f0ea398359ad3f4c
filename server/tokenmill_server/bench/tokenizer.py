"""Finds the tokenizer that makes and counts benchmark prompts."""

from pathlib import Path

from tokenizers import Tokenizer

from tokenmill_engine.errors import ConfigError


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a model folder.

    Raises: ConfigError.
    """
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"no tokenizer found for {name!r}; give --tokenizer, or --prompt-format ids with --vocab-size"
        )
    return Tokenizer.from_file(str(file))
