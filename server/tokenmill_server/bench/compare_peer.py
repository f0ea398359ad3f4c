"""The offline side of a comparison, in a process of its own: `python compare_peer.py --model FOLDER ...`.

Reads one task per line from standard input and answers each with one line of figures on standard output; both are
JSON. Whatever else writes to standard output goes to standard error. The peer's interpreter runs this file as a
script, so it imports nothing but the standard library and, when it starts, the peer's public `LLM` class. Our own side
(`compare_ours.py`) takes everything but the engine from here, so both are measured by one definition.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Prompts = Sequence[Sequence[int]]
StepEvent = tuple[float, dict[int, int]]
"""When the output of an engine step arrived (seconds), and how many tokens it had for which prompt."""

_SETTLING_STEPS = 2
"""Steps after the last prompt's first token that are not counted."""


class MeasurementError(Exception):
    """What came is not what was to be measured."""


class Engine(Protocol):
    """What a side can do."""

    name: str

    def generate(self, prompts: Prompts, output_len: int) -> int:
        """Greedy output of exactly `output_len` tokens for each prompt; returns the number of tokens."""

    def steps(self, prompts: Prompts, output_len: int) -> list[StepEvent]:
        """The same, step by step, in the order in which outputs came."""


def serve_tasks(make_engine: Callable[[Sequence[str]], Engine]) -> None:
    """Starts the engine that the command line describes and works on tasks until standard input ends."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        engine = make_engine(sys.argv[1:])
        answers.write(json.dumps({"ready": engine.name}) + "\n")
        for line in sys.stdin:
            answers.write(json.dumps(_answer(engine, json.loads(line))) + "\n")


def _answer(engine: Engine, task: dict[str, Any]) -> dict[str, Any]:
    """What one task yields: figures, or an `error` that leaves the engine usable."""
    try:
        return run_task(engine, task)
    except MeasurementError as error:
        return {"error": str(error)}


def run_task(engine: Engine, task: dict[str, Any]) -> dict[str, float]:
    """Figures of one task: `kind`, `num_prompts`, `input_len`, `output_len`, `vocab_size`, `seed`.

    Raises: MeasurementError.
    """
    prompts = random_prompts(task["num_prompts"], task["input_len"], task["vocab_size"], task["seed"])
    if task["kind"] == "decode":
        return _decode(engine, prompts, task["output_len"])
    started_s = time.perf_counter()
    num_output = engine.generate(prompts, task["output_len"])
    elapsed_s = time.perf_counter() - started_s
    if num_output != len(prompts) * task["output_len"]:
        raise MeasurementError(f"{num_output} tokens came, not {task['output_len']} for each of {len(prompts)} prompts")
    num_input = sum(map(len, prompts))
    return {
        "elapsed_s": elapsed_s,
        "output_tok_s": num_output / elapsed_s,
        "input_tok_s": num_input / elapsed_s,
        "total_tok_s": (num_input + num_output) / elapsed_s,
    }


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids from the upper 98 % of the vocabulary (special tokens usually come first)."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size // 50, vocab_size) for _ in range(length)] for _ in range(count)]


def _decode(engine: Engine, prompts: Prompts, output_len: int) -> dict[str, float]:
    """The prompts are computed first and found in the prefix cache then, so all of them decode nearly from the start
    and none is finished before the last has begun. `input_tok_s` is the rate of the former, unless they were in the
    cache before."""
    started_s = time.perf_counter()
    engine.generate(prompts, 1)
    prefill_s = time.perf_counter() - started_s
    times_ms = pure_decode_ms(engine.steps(prompts, output_len), len(prompts))
    if not times_ms:
        raise MeasurementError(f"no step decoded all {len(prompts)} sequences and nothing else")
    ordered = sorted(times_ms)
    return {
        "step_ms": statistics.median(ordered),
        "mean_step_ms": statistics.fmean(ordered),
        "p99_step_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "num_steps": len(ordered),
        "prefill_s": prefill_s,
        "input_tok_s": sum(map(len, prompts)) / prefill_s,
    }


def pure_decode_ms(events: Sequence[StepEvent], batch_size: int) -> list[float]:
    """Milliseconds between the outputs of two consecutive steps of which each gave every sequence exactly one token,
    none of them its first."""
    begun: set[int] = set()
    pure: list[bool] = []
    for _, counts in events:
        all_one = len(counts) == batch_size and set(counts.values()) == {1}
        pure.append(all_one and len(begun) == batch_size)
        begun.update(counts)
    pairs = [index for index in range(1, len(events)) if pure[index - 1] and pure[index]]
    return [(events[index][0] - events[index - 1][0]) * 1e3 for index in pairs[_SETTLING_STEPS:]]


def llm_arguments(flags: Sequence[str]) -> dict[str, Any]:
    """The server's flags with numbers, such as `--tensor-parallel-size 2`, as arguments of `LLM`.

    Raises: ValueError.
    """
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return {name.removeprefix("--").replace("-", "_"): int(number) for name, number in pairs}


class _Vllm:
    """vLLM through its public class; single steps through the engine that it wraps."""

    def __init__(self, arguments: Sequence[str]) -> None:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--model", required=True)
        parser.add_argument("--dtype", required=True)
        parser.add_argument("--max-model-len", type=int, required=True)
        parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON: more arguments of LLM")
        options, flags = parser.parse_known_args(arguments)
        try:
            engine_args = options.engine_args | llm_arguments(flags)
        except ValueError:
            parser.error(f"{' '.join(flags)}: not a flag with a number; --engine-args takes any argument of LLM")
        vllm = importlib.import_module("vllm")
        self.name = f"vLLM {importlib.metadata.version('vllm')}"
        self._sampling: Any = vllm.SamplingParams
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._llm = vllm.LLM(
            model=options.model,
            load_format="dummy",
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            seed=0,
            **engine_args,
        )
        self._num_requests = 0

    def generate(self, prompts: Prompts, output_len: int) -> int:
        sampling = self._sampling(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def steps(self, prompts: Prompts, output_len: int) -> list[StepEvent]:
        engine = self._llm.llm_engine
        sampling = self._sampling(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        numbers: dict[str, int] = {}
        for number, prompt in enumerate(prompts):
            self._num_requests += 1
            request_id = f"step{self._num_requests}"
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
            numbers[request_id] = number
        events: list[StepEvent] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s = time.perf_counter()
            # Some releases append a suffix of their own to the id.
            counts = {numbers[out.request_id.partition("-")[0]]: len(out.outputs[0].token_ids) for out in outputs}
            if counts := {number: count for number, count in counts.items() if count}:
                events.append((now_s, counts))
        return events


if __name__ == "__main__":
    serve_tasks(_Vllm)
