"""What launchers must have in common."""

import shutil
from pathlib import Path

import pytest

from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_server.data_parallel.agreement import difference, facts_of
from tokenmill_server.data_parallel.messages import Facts
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags


def facts(*arguments: str) -> Facts:
    configuration = build_configuration(read_flags(["--device", "cpu", *arguments], {}))
    return facts_of(configuration.engine, configuration.data_parallel)


def test_alike_wherever_the_files_are(tmp_path: Path) -> None:
    (tmp_path / "elsewhere.gguf").symlink_to(embedded_model_path())
    here = facts("-dp", "2", "-dph", "-dpl", "1", "--served-model-name", "m", "--port", "1")
    there = facts(str(tmp_path / "elsewhere.gguf"), "-dp", "2", "-dpr", "1", "-dpl", "1", "--served-model-name", "m")
    assert difference(here, there) is None
    assert here.model_digest == there.model_digest


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["-dp", "2"], "the head has --data-parallel-size 1 and this launcher 2; give both the same"),
        (["--dtype", "float32"], "the head has --dtype bfloat16 and this launcher float32"),
        (["--max-model-len", "512"], "the head has --max-model-len 8192 (not given) and this launcher 512"),
        (["--max-model-len", "8192"], "--max-model-len 8192 (not given) and this launcher 8192;"),
        (["--block-size", "32"], "--block-size 16 and this launcher 32"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching True and this launcher False"),
        (["--served-model-name", "x"], "--served-model-name SmolLM2-135M-Instruct and this launcher x"),
        (["--metrics-namespace", "vllm"], "--metrics-namespace tokenmill and this launcher vllm"),
        (["--disable-log-stats"], "--disable-log-stats False and this launcher True"),
        (["--max-num-seqs", "4"], "--max-num-seqs 256 and this launcher 4"),
        (["--max-num-batched-tokens", "2048"], "--max-num-batched-tokens 2048 (not given) and this launcher 2048"),
        (["--scheduling-policy", "priority"], "--scheduling-policy fcfs and this launcher priority"),
        (["--target-itl-ms", "30"], "--target-itl-ms None and this launcher 30.0"),
        (["--enforce-eager"], "--enforce-eager False and this launcher True"),
        (["--attention-backend", "native"], "--attention-backend auto and this launcher native"),
        (["--no-async-scheduling"], "--async-scheduling True and this launcher False"),
        (["-tp", "3"], "--tensor-parallel-size 1 and this launcher 3"),
        (["-pp", "2"], "--pipeline-parallel-size 1 and this launcher 2"),
        (["--seed", "1"], "--seed 0 and this launcher 1"),
    ],
)
def test_flags_that_must_agree(arguments: list[str], problem: str) -> None:
    assert problem in str(difference(facts(), facts(*arguments)))


@pytest.mark.parametrize("arguments", [["--kv-cache-memory-bytes", "64M"], ["--num-gpu-blocks-override", "99"]])
def test_machines_may_have_more_or_less_memory(arguments: list[str]) -> None:
    assert difference(facts(), facts(*arguments)) is None


def test_other_weights_are_another_model(tmp_path: Path) -> None:
    """The architecture alone does not tell them apart, nor does the name."""
    original = cached_tiny_model("llama")
    copy = tmp_path / original.name
    shutil.copytree(original, copy)
    flags = ("--served-model-name", "m")
    assert difference(facts(str(original), *flags), facts(str(copy), *flags)) is None
    weights = next(copy.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    problem = str(difference(facts(str(original), *flags), facts(str(copy), *flags)))
    assert problem.startswith(f"the head serves {original.name} (")
    assert problem.endswith("which is another model; give both the same")


def test_dummy_weights_have_no_files() -> None:
    assert difference(facts("--load-format", "dummy"), facts("--load-format", "dummy")) is None
    assert "another model" in str(difference(facts("--load-format", "dummy"), facts()))
