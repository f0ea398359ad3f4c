from pathlib import Path

import pytest

from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME, embedded_model_path
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.tokenizer import load_tokenizer
from tokenmill_server.bench.workload import RandomShape, text_prompts


@pytest.mark.slow
def test_the_embedded_model_by_name_or_file() -> None:
    tokenizer = load_tokenizer(EMBEDDED_MODEL_NAME)
    assert tokenizer.encode("Hello world").ids == load_tokenizer(str(embedded_model_path())).encode("Hello world").ids
    prompts = text_prompts(RandomShape(300, 10), 4, tokenizer, seed=0)
    assert [len(tokenizer.encode(str(prompt.content)).ids) for prompt in prompts] == [300] * 4


def test_a_folder_or_its_file(word_tokenizer: Path) -> None:
    for path in (word_tokenizer, word_tokenizer / "tokenizer.json"):
        assert load_tokenizer(str(path)).encode("w5 w7").ids == [5, 7]


def test_unknown_name_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="--tokenizer FOLDER"):
        load_tokenizer("nobody/has-this-model")
