"""The offline latency benchmark: how long one batch of fixed shape takes, again and again."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from tokenmill_engine.messages import SamplingParams
from tokenmill_server.bench.offline import start_engine, write_result
from tokenmill_server.bench.workload import RandomShape, id_prompts

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(slots=True, frozen=True)
class LatencyBench:
    """One run of the latency benchmark."""

    engine_flags: tuple[str, ...]
    input_len: int
    output_len: int
    batch_size: int
    n: int
    num_iters_warmup: int
    num_iters: int
    output_json: Path | None
    show_progress: bool


def run(bench: LatencyBench) -> int:
    """Run, print mean and percentiles, write the result file if asked. Returns the exit code.

    Every iteration has prompts of its own, so that none is served from the prefix cache.
    Raises: ConfigError, StartupError.
    """
    shape = RandomShape(bench.input_len, bench.output_len)
    params = SamplingParams(n=bench.n, temperature=1.0, ignore_eos=True, max_tokens=bench.output_len)
    latencies_s = []
    with start_engine(bench.engine_flags) as llm:
        rounds = range(bench.num_iters_warmup + bench.num_iters)
        for index in tqdm(rounds, disable=not bench.show_progress):
            prompts = id_prompts(shape, bench.batch_size, llm.tokenizer.num_tokens, seed=index)
            inputs = [prompt.content for prompt in prompts]
            started_s = time.perf_counter()
            llm.generate(inputs, params, use_tqdm=False)
            if index >= bench.num_iters_warmup:
                latencies_s.append(time.perf_counter() - started_s)
    mean_s = float(np.mean(latencies_s))
    percentiles_s = {str(rank): float(np.percentile(latencies_s, rank)) for rank in _PERCENTILES}
    sys.stdout.write(f"Avg latency: {mean_s} seconds\n")
    for rank, value_s in percentiles_s.items():
        sys.stdout.write(f"{rank}% percentile latency: {value_s} seconds\n")
    if bench.output_json is not None:
        result = {"avg_latency": mean_s, "latencies": latencies_s, "percentiles": percentiles_s}
        write_result(bench.output_json, result)
    return 0
