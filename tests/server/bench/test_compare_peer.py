"""The offline driver: its arithmetic, and the script as the peer's interpreter runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_peer import write_scripted_peer
from tokenmill_server.bench import compare_peer
from tokenmill_server.bench.compare_peer import (
    MeasurementError,
    Prompts,
    StepEvent,
    pure_decode_ms,
    random_prompts,
    run_task,
)

TASK = {"num_prompts": 3, "input_len": 5, "output_len": 20, "vocab_size": 1000, "seed": 1}


def test_only_steps_in_which_everybody_decodes_count() -> None:
    events: list[StepEvent] = [
        (0.000, {0: 1}),  # first token of the first
        (0.010, {0: 1, 1: 1}),  # and of the second
        (0.030, {0: 1, 1: 1}),
        (0.031, {0: 1, 1: 1}),
        (0.033, {0: 1, 1: 1}),
        (0.036, {0: 1, 1: 1}),
        (0.040, {0: 2, 1: 1}),  # two tokens at once
        (0.060, {0: 1, 1: 1}),
        (0.065, {0: 1, 1: 1}),
        (0.066, {1: 1}),  # the first is finished
    ]
    # 1, 2, 3 and 5 ms; the first two settle
    assert pure_decode_ms(events, 2) == pytest.approx([3.0, 5.0])
    assert pure_decode_ms(events[:2], 2) == []


class SteadyEngine:
    """Step `i` of three sequences ends after 4 ms, but the last one after 40."""

    name = "steady"

    def __init__(self, steps: int = 12) -> None:
        self.generated: list[int] = []
        self._steps = steps

    def generate(self, prompts: Prompts, output_len: int) -> int:
        self.generated.append(output_len)
        return len(prompts) * output_len

    def steps(self, prompts: Prompts, output_len: int) -> list[StepEvent]:
        times = [0.004 * step for step in range(self._steps - 1)]
        return [(time, dict.fromkeys(range(len(prompts)), 1)) for time in [*times, times[-1] + 0.04]]


def test_a_decode_task() -> None:
    engine = SteadyEngine()
    figures = run_task(engine, {"kind": "decode", **TASK})
    assert engine.generated == [1]  # the prompts are in the prefix cache before steps are timed
    assert figures["step_ms"] == pytest.approx(4.0)
    assert figures["num_steps"] == 8
    assert figures["mean_step_ms"] == pytest.approx((7 * 4 + 40) / 8)
    assert figures["input_tok_s"] == pytest.approx(15 / figures["prefill_s"])
    with pytest.raises(MeasurementError, match="no step decoded all 3 sequences"):
        run_task(SteadyEngine(steps=3), {"kind": "decode", **TASK})


def test_a_throughput_task() -> None:
    figures = run_task(SteadyEngine(), {"kind": "throughput", **TASK})
    assert figures["output_tok_s"] == pytest.approx(60 / figures["elapsed_s"])
    assert figures["input_tok_s"] == pytest.approx(15 / figures["elapsed_s"])


def test_prompts_are_random_and_repeatable() -> None:
    prompts = random_prompts(50, 40, 1000, seed=3)
    assert prompts == random_prompts(50, 40, 1000, seed=3)
    assert prompts != random_prompts(50, 40, 1000, seed=4)
    assert prompts[:20] == random_prompts(20, 40, 1000, seed=3)  # a smaller batch finds its prompts in the cache
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert {len(prompt) for prompt in prompts} == {40}
    assert all(20 <= token_id < 1000 for prompt in prompts for token_id in prompt)


def drive(folder: Path, tasks: list[dict[str, Any]], *arguments: str) -> tuple[list[dict[str, Any]], str, int]:
    """(answers, standard error, exit status) of the script with the scripted peer."""
    command = [sys.executable, compare_peer.__file__, "--model", "/m", "--dtype", "bfloat16"]
    done = subprocess.run(
        [*command, "--max-model-len", "512", *arguments],
        input="".join(json.dumps(task) + "\n" for task in tasks),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(write_scripted_peer(folder)), "PYTHONSAFEPATH": "1"},
        check=False,
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr, done.returncode


def test_the_script_drives_the_peer(tmp_path: Path) -> None:
    tasks = [{"kind": "throughput", **TASK}, {"kind": "decode", **TASK}]
    answers, log, status = drive(tmp_path, tasks, "--engine-args", '{"more": 1}')
    assert (status, len(answers)) == (0, 3)
    assert answers[0] == {"ready": "vLLM 9.9"}
    assert answers[1]["output_tok_s"] == pytest.approx(60 / answers[1]["elapsed_s"])
    assert answers[1]["elapsed_s"] >= 0.01
    assert 5.0 <= answers[2]["step_ms"] < 500.0  # 2 ms and 1 ms for each of the three, and what else the machine does
    assert "noise on standard output" in log
    assert "'model': '/m', 'dtype': 'bfloat16', 'max_model_len': 512, 'more': 1" in log


def test_flags_of_servers_are_arguments_of_the_peer(tmp_path: Path) -> None:
    flags = ["--engine-args", '{"more": 1}', "--tensor-parallel-size", "2", "--seats", "3"]
    answers, log, status = drive(tmp_path, [], *flags)
    assert (status, answers) == (0, [{"ready": "vLLM 9.9"}])
    assert "'more': 1, 'tensor_parallel_size': 2, 'seats': 3}" in log


def test_another_flag_is_refused(tmp_path: Path) -> None:
    for flags in (["--enforce-eager"], ["--dtype-of-cache", "fp8"]):
        answers, log, status = drive(tmp_path / flags[0], [], *flags)
        assert (status, answers) == (2, [])
        assert f"{' '.join(flags)}: not a flag with a number" in log


def test_a_peer_that_answers_too_little_is_no_measurement(tmp_path: Path) -> None:
    tasks = [{"kind": "throughput", **TASK}, {"kind": "decode", **TASK}]
    answers, _, status = drive(tmp_path, tasks, "--engine-args", '{"lost_tokens": 2}')
    assert status == 0
    assert answers[1] == {"error": "54 tokens came, not 20 for each of 3 prompts"}
    assert answers[2]["step_ms"] >= 5.0
