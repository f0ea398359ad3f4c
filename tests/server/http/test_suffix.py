"""The middle of a text, by models that have learnt it."""

from pathlib import Path

import httpx
import pytest

from tests.support.api_server import engine_config, run_server
from tests.support.sse import is_error, post_stream
from tests.support.tiny_models import add_special_tokens, write_tokenizer
from tokenmill_server.processing.fill_in_middle import find_fill_in_middle
from tokenmill_server.processing.tokenizer import load_tokenizer

PATH = "/v1/completions"
FORMS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
]


@pytest.mark.parametrize("tokens", FORMS)
def test_forms(tmp_path: Path, tokens: tuple[str, ...]) -> None:
    write_tokenizer(tmp_path)
    assert find_fill_in_middle(load_tokenizer(str(tmp_path))) is None
    add_special_tokens(tmp_path, *tokens[:2])
    assert find_fill_in_middle(load_tokenizer(str(tmp_path))) is None
    add_special_tokens(tmp_path, tokens[2])
    tokenizer = load_tokenizer(str(tmp_path))
    form = find_fill_in_middle(tokenizer)
    assert form is not None
    ids = tokenizer.encode(form.prompt("def f(", "return"))
    assert tokenizer.decode(ids, False) == f"{tokens[0]}def f({tokens[1]}return{tokens[2]}"
    assert [id_ for id_ in ids if id_ in tokenizer.special_token_ids] == [tokenizer.token_id(each) for each in tokens]


@pytest.mark.slow
def test_the_model_is_asked_for_the_middle(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    add_special_tokens(tmp_path, *FORMS[0])
    tokenizer = load_tokenizer(str(tmp_path))
    with run_server(engine=engine_config(tokenizer_path=str(tmp_path))) as server, server.client() as client:
        body = {"prompt": "def add(", "suffix": "return first", "max_tokens": 2, "temperature": 0}
        wanted = tokenizer.encode("<|fim_prefix|>def add(<|fim_suffix|>return first<|fim_middle|>")
        reply = client.post(PATH, json=body | {"return_token_ids": True}).json()
        assert reply["choices"][0]["prompt_token_ids"] == wanted
        assert post_stream(client, PATH, body).text() == reply["choices"][0]["text"]
        several = client.post(PATH, json=body | {"prompt": ["a", "b"], "return_token_ids": True}).json()
        assert len(several["choices"]) == 2
        plain = client.post(PATH, json=body | {"suffix": "", "return_token_ids": True}).json()
        assert plain["choices"][0]["prompt_token_ids"] == tokenizer.encode("def add(")
        for wrong in ({"prompt": [5, 6]}, {"echo": True}, {"suffix": 5}):
            assert is_error(client.post(PATH, json=body | wrong), 400, "suffix")


def test_a_model_that_has_not_learnt_it(client: httpx.Client) -> None:
    response = client.post(PATH, json={"prompt": "a", "suffix": "b"})
    assert is_error(response, 400, "suffix", "unsupported_parameter")
    assert "filling in the middle" in response.json()["error"]["message"]
