import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from tokenmill_engine.errors import ConfigError
from tokenmill_engine.vocabulary.token_bytes import build_token_bytes, incomplete_tail
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer

RENDERED = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
RENDERED_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
    *(198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]


def write_folder(tmp_path: Path, config: dict[str, object] | None = None, bos: bool = False) -> Path:
    """A byte-level tokenizer of 256 letters and two special tokens, as a Hugging Face folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_reference_prompt(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(RENDERED) == RENDERED_IDS
    assert tokenizer.decode(RENDERED_IDS, skip_special_tokens=False) == RENDERED


def test_white_space_before_digits(tokenizer: Tokenizer) -> None:
    """Where a loader that drops the digit split of SmolLM goes wrong."""
    assert tokenizer.encode("a  12") == [81, 256, 33, 34]
    assert tokenizer.encode("\n\n1.") == [1116, 33, 30]


def test_special_tokens_are_the_control_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.visible_bytes[2] == b""
    assert tokenizer.token_bytes[2] == b"<|im_end|>"
    assert tokenizer.decode([504, 2]) == "The"


@given(text=st.text(st.characters(exclude_categories=["Cc", "Cs"], max_codepoint=0x1FFFF)))
def test_bytes_are_what_decoding_concatenates(tokenizer: Tokenizer, text: str) -> None:
    assume(all(bytes([byte]) in tokenizer.token_bytes for byte in text.encode()))  # some rare bytes have no token
    ids = tokenizer.encode(text, add_special_tokens=False)
    data = b"".join(tokenizer.bytes_of(token_id) for token_id in ids)
    assert data.decode() == text


@given(ids=st.lists(st.integers(0, 49151)))
def test_bytes_of_any_ids_decode_alike(tokenizer: Tokenizer, ids: list[int]) -> None:
    data = b"".join(tokenizer.bytes_of(token_id) for token_id in ids)
    assert data.decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.asyncio
async def test_long_texts_give_the_same_ids_in_a_thread(tokenizer: Tokenizer) -> None:
    text = "some words, " * 2000
    assert await tokenizer.encode_many([text, "a b"]) == [tokenizer.encode(text), tokenizer.encode("a b")]


def test_truncation_of_the_file_is_not_applied(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(write_folder(tmp_path)))
    assert len(tokenizer.encode("abcdefgh")) == 8


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("wanted", [False, True])
def test_add_bos_token_of_the_config_decides(tmp_path: Path, in_file: bool, wanted: bool) -> None:
    config: dict[str, object] = {"add_bos_token": wanted, "bos_token": "<s>"}
    tokenizer = load_tokenizer(str(write_folder(tmp_path, config, bos=in_file)))
    assert tokenizer.encode("ab")[:-2] == ([256] if wanted else [])
    assert len(tokenizer.encode("ab", add_special_tokens=False)) == 2


def test_tokens_that_only_the_config_calls_special(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"][1]["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert load_tokenizer(str(folder)).special_token_ids == {256}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"257": {"content": "</s>", "special": True}}})
    )
    assert load_tokenizer(str(folder)).special_token_ids == {256, 257}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.model": b"x"}, "only tokenizer.model"),
        ({"tokenizer.json": b'{"model": '}, "damaged"),
    ],
)
def test_unusable_folders(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(tmp_path))


def test_other_decoders_are_refused() -> None:
    backend = Backend(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.BPEDecoder()
    with pytest.raises(ConfigError, match="BPEDecoder"):
        build_token_bytes(backend)


@given(st.text(), st.integers(0, 3))
def test_incomplete_tail_is_what_the_last_character_lacks(text: str, cut: int) -> None:
    data = text.encode()
    last = text[-1:].encode()
    cut = min(cut, max(0, len(last) - 1))
    shortened = data[: len(data) - cut]
    assert incomplete_tail(shortened) == (last[: len(last) - cut] if cut else b"")
