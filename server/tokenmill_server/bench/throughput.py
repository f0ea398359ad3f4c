"""The offline throughput benchmark: one large batch of random prompts through `LLM.generate`."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tokenmill_engine.messages import SamplingParams
from tokenmill_server.bench.offline import start_engine, write_result
from tokenmill_server.bench.workload import RandomShape, id_prompts


@dataclass(slots=True, frozen=True)
class ThroughputBench:
    """One run of the throughput benchmark."""

    engine_flags: tuple[str, ...]
    shape: RandomShape
    num_prompts: int
    n: int
    output_json: Path | None
    show_progress: bool


def run(bench: ThroughputBench) -> int:
    """Run, print one line, write the result file if asked. Returns the exit code.

    Raises: ConfigError, StartupError.
    """
    with start_engine(bench.engine_flags) as llm:
        prompts = id_prompts(bench.shape, bench.num_prompts, llm.tokenizer.num_tokens, seed=0)
        params = [
            SamplingParams(n=bench.n, temperature=1.0, ignore_eos=True, max_tokens=prompt.output_len)
            for prompt in prompts
        ]
        inputs = [prompt.content for prompt in prompts]
        started_s = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=bench.show_progress)
        elapsed_s = time.perf_counter() - started_s
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    num_total = num_output + sum(prompt.num_tokens for prompt in prompts)
    sys.stdout.write(
        f"Throughput: {len(prompts) / elapsed_s:.2f} requests/s, {num_total / elapsed_s:.2f} total tokens/s, "
        f"{num_output / elapsed_s:.2f} output tokens/s\n"
    )
    if bench.output_json is not None:
        result = {
            "elapsed_time": elapsed_s,
            "num_requests": len(prompts),
            "total_num_tokens": num_total,
            "total_output_tokens": num_output,
            "requests_per_second": len(prompts) / elapsed_s,
            "tokens_per_second": num_total / elapsed_s,
            "output_tokens_per_second": num_output / elapsed_s,
        }
        write_result(bench.output_json, result)
    return 0
