"""Comparisons that our side cannot take part in are refused before anything is measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import tiny_config
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.bench import cli
from tokenmill_server.bench.compare_check import check_variants
from tokenmill_server.bench.compare_groups import GROUPS, plans_of
from tokenmill_server.bench.compare_plan import sessions_of


def shape(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**tiny_config("llama"), **sizes}))
    return folder


def check(group: str, model: Path, *flags: str) -> None:
    sessions = sessions_of(plans_of(group), 2, with_peer=True)
    check_variants(sessions, dict.fromkeys(("8b", "1b", "70b", "vl7b"), model), flags)


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_is_possible_for_a_model_that_can_be_halved_twice(group: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}
    check(group, shape(tmp_path / "m", **heads), "--device", "cpu")


def test_what_is_impossible(tmp_path: Path) -> None:
    odd = shape(tmp_path / "odd", num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=1)
    check("offline", odd, "--device", "cpu")
    with pytest.raises(ConfigError, match=r"nothing is measured, since ours, 8b, --tensor-parallel-size 2 .* 9 attent"):
        check("tp2", odd, "--device", "cpu")
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 2 is impossible"):
        check("pp2", odd, "--device", "cpu")
    with pytest.raises(ConfigError, match="default flags is impossible: unknown flag --no-such"):
        check("offline", odd, "--no-such", "1")


def test_more_devices_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(StartupError, match="1b, default flags is impossible: --device cuda: no CUDA device is visible"):
        check("online1b", shape(tmp_path / "m"), "--device", "cuda")


def test_a_refusal_leaves_no_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    odd = shape(tmp_path / "odd", num_attention_heads=9, num_key_value_heads=3)
    arguments = ["--group", "pp2", "--model-8b", str(odd), "--args=--device cpu", "--output", str(output)]
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is impossible"):
        cli.main(["compare", *arguments])
    assert not output.exists()


def test_our_driver_tells_a_wrong_flag_in_one_line() -> None:
    command = [sys.executable, "-m", "tokenmill_server.bench.compare_ours", "--no-such-flag", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "tokenmill: error: unknown flag --no-such-flag\n"
