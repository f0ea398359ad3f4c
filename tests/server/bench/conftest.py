"""Fixtures of the benchmark tests."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A model folder whose tokenizer knows the words w0 .. w99."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(100)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
