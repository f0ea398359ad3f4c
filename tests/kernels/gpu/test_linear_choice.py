"""The table that chooses a matrix kernel: shipped, measured, kept."""

import json
import logging
from pathlib import Path

import pytest

from tokenmill_kernels.gpu.linear_choice import TOKEN_BLOCKS, ChoiceTable, Kind, Problem, StreamConfig, token_block

H100 = "NVIDIA H100 80GB HBM3"
H200 = "NVIDIA H200"
QKV_8B = Problem("linear", 6144, 4096)
STRANGE = Problem("gated", 1234, 808)
CONFIG = StreamConfig(64, 128, 4, 4, 1, 0, 2)


@pytest.mark.parametrize("card", [H100, "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "never heard of it"])
@pytest.mark.parametrize("kind", ["linear", "gated", "argmax"])
def test_every_card_has_an_answer_for_every_shape(card: str, kind: Kind) -> None:
    table = ChoiceTable(card, None)
    for block_t in TOKEN_BLOCKS:
        config = table.choose(Problem(kind, 1000, 520), block_t)
        assert config is None or config.block_n >= 8
        assert not table.is_known(Problem(kind, 1000, 520), block_t)


def test_shapes_of_common_models_are_known() -> None:
    table = ChoiceTable(H100, None)
    assert all(table.is_known(QKV_8B, block_t) for block_t in TOKEN_BLOCKS)


@pytest.mark.parametrize(("num_tokens", "block"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (64, 64)])
def test_token_block(num_tokens: int, block: int) -> None:
    assert token_block(num_tokens) == block


def test_measurements_are_used_and_kept(tmp_path: Path) -> None:
    table = ChoiceTable(H100, tmp_path / "new")
    table.remember({STRANGE.key(8): CONFIG})
    table.remember({STRANGE.key(16): None})
    later = ChoiceTable(H100, tmp_path / "new")
    for each in (table, later):
        assert each.choose(STRANGE, 8) == CONFIG
        assert each.choose(STRANGE, 16) is None
        assert each.is_known(STRANGE, 16)
        assert not each.is_known(STRANGE, 32)
    assert not ChoiceTable("NVIDIA H100 PCIe", tmp_path / "new").is_known(STRANGE, 8)
    assert len(list((tmp_path / "new").glob("*.json"))) == 1


def test_processes_keep_the_measurements_of_each_other(tmp_path: Path) -> None:
    mine, other = ChoiceTable(H100, tmp_path), ChoiceTable(H100, tmp_path)
    mine.remember({STRANGE.key(8): CONFIG})
    other.remember({STRANGE.key(16): None, STRANGE.key(32): CONFIG})
    mine.remember({STRANGE.key(64): None})
    assert mine.is_known(STRANGE, 32)
    later = ChoiceTable(H100, tmp_path)
    assert [later.is_known(STRANGE, block_t) for block_t in TOKEN_BLOCKS] == [False, True, True, True, True]
    assert later.choose(STRANGE, 8) == later.choose(STRANGE, 32) == CONFIG


def test_what_another_family_of_cards_was_measured_with_is_a_first_guess(tmp_path: Path) -> None:
    table, guess = ChoiceTable(H200, tmp_path), ChoiceTable(H100, None).choose(QKV_8B, 8)
    assert guess is not None
    assert table.choose(QKV_8B, 8) == guess
    assert table.candidates(QKV_8B, 8)[0] == guess
    assert not any(table.is_known(QKV_8B, block_t) for block_t in TOKEN_BLOCKS)
    table.remember({QKV_8B.key(8): CONFIG, QKV_8B.key(16): None})
    for each in (table, ChoiceTable(H200, tmp_path)):
        assert each.is_known(QKV_8B, 8)
        assert each.choose(QKV_8B, 8) == CONFIG
        assert each.choose(QKV_8B, 16) is None


def test_measurements_do_not_replace_what_was_measured_for_the_shipped_table(tmp_path: Path) -> None:
    table = ChoiceTable(H100, tmp_path)
    table.remember({QKV_8B.key(8): CONFIG})
    assert table.choose(QKV_8B, 8) != CONFIG


BROKEN = [
    "",
    "{",
    "[]",
    '{"gated 1234x808 8": [1, 2]}',
    '{"gated 1234x808 8": "x"}',
    '{"gated 1234x808 9": [64, 128, 4, 4, 1, 0, 2]}',
    '{"gated 1234x808 8": [64, 128.0, 4, 4, 1, 0, 2]}',
    '{"gated 1234x808 8": [4, 1024, 4, 4, 1, 0, 2]}',
    '{"gated 1234x808 8": [48, 128, 4, 4, 1, 0, 2]}',
    '{"gated 1234x808 8": [64, 128, 4, 4, 1, -1, 2]}',
    '{"gated 1234x808 8": [8, 64, 4, 4, 1, 0, 2]}',
    '{"gated 1234x808 64": [256, 128, 4, 4, 2, 0, 2]}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_measured_again(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    ChoiceTable(H100, tmp_path).remember({STRANGE.key(8): CONFIG})
    (path,) = tmp_path.glob("*.json")
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        table = ChoiceTable(H100, tmp_path)
    assert str(path) in caplog.text
    assert not table.is_known(STRANGE, 8)
    table.remember({STRANGE.key(8): CONFIG})
    assert json.loads(path.read_text()) == {STRANGE.key(8): [64, 128, 4, 4, 1, 0, 2]}


def test_a_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    table = ChoiceTable(H100, tmp_path / "file")
    table.remember({STRANGE.key(8): CONFIG})
    assert "cannot be kept" in caplog.text
    assert table.choose(STRANGE, 8) == CONFIG
