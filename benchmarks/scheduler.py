"""Host cost of an engine step: scheduling, input planning, commit and output packing, with a device that costs nothing.

    python benchmarks/scheduler.py [--num-seqs 256] [--steps 2000] [--clients 1]

Every request decodes; one in `block_size` needs a new block and completes one in each step, as in steady traffic.
"""

import argparse
import json
import time

import msgspec
import numpy as np

from tokenmill_engine.config.architecture import ArchitectureConfig, RopeConfig
from tokenmill_engine.config.engine import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
)
from tokenmill_engine.engine import EngineCore
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.messages import AddRequest, SamplingParams
from tokenmill_engine.outputs import KVCapacity, StepPlan, StepResult

_VOCAB_SIZE = 49152
_MAX_MODEL_LEN = 8192


class NullExecutor:
    """Answers every plan at once with the same token. A step is its own handle."""

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}

    def submit(self, plan: StepPlan) -> "NullStep":
        return NullStep(plan)

    def shutdown(self) -> None:
        self._results.clear()


class NullStep:
    """A step that is done."""

    def __init__(self, plan: StepPlan) -> None:
        num_new = plan.samples.astype(np.int32)
        token_ids = np.where(plan.samples, 5, -1).astype(np.int32)[:, np.newaxis]
        self._result = StepResult(plan.step, token_ids, num_new)

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


def engine_config(num_seqs: int, log_stats: bool) -> EngineConfig:
    """A configuration of which only the scheduling part matters."""
    architecture = ArchitectureConfig(
        name="LlamaForCausalLM",
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=_MAX_MODEL_LEN,
        rope=RopeConfig(),
        layer_windows=(None,),
        tie_word_embeddings=True,
    )
    model = ModelConfig(
        name="null",
        path="",
        tokenizer_path="",
        architecture=architecture,
        load_format="dummy",
        dtype="bfloat16",
        seed=0,
        max_model_len=_MAX_MODEL_LEN,
        max_model_len_explicit=False,
        eos_token_ids=(2,),
    )
    return EngineConfig(
        model=model,
        cache=CacheConfig(),
        scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=8192),
        observability=ObservabilityConfig(model_name="null", log_stats=log_stats),
    )


def run(num_seqs: int, num_steps: int, num_clients: int, log_stats: bool) -> dict[str, float]:
    """CPU microseconds per step of `num_seqs` decodes, and of encoding its messages (the output thread's work)."""
    num_blocks = num_seqs * (num_steps + 600) // 16
    groups = group_layers([KVSpec("full", 1, 64, "bfloat16")])
    capacity = KVCapacity(num_blocks, 16, _MAX_MODEL_LEN, 0, groups, "null", {})
    core = EngineCore(engine_config(num_seqs, log_stats), NullExecutor(), capacity)
    generator = np.random.default_rng(0)
    for index in range(num_seqs):
        prompt = generator.integers(10, _VOCAB_SIZE, size=64 + index % 16, dtype=np.int32)
        sampling = SamplingParams(max_tokens=_MAX_MODEL_LEN - 128)
        request_id = make_request_id(index % num_clients, 0, index)
        core.handle(AddRequest(request_id, "bench", prompt.tobytes(), sampling, 0.0))
    while core.scheduler.load.num_waiting:
        core.step()
    encoder = msgspec.msgpack.Encoder()
    steps, encoding = [], []
    for _ in range(num_steps):
        started = time.thread_time()
        outputs = core.step()
        stepped = time.thread_time()
        for _, message in outputs:
            encoder.encode(message)
        steps.append(stepped - started)
        encoding.append(time.thread_time() - stepped)
    core.shutdown()
    return {
        "step_us_mean": float(np.mean(steps)) * 1e6,
        "step_us_median": float(np.median(steps)) * 1e6,
        "step_us_p99": float(np.percentile(steps, 99)) * 1e6,
        "encode_us_mean": float(np.mean(encoding)) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--no-metrics", action="store_true", help="as with --disable-log-stats")
    args = parser.parse_args()
    result = run(args.num_seqs, args.steps, args.clients, not args.no_metrics)
    print(json.dumps({name: round(value, 1) for name, value in result.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
