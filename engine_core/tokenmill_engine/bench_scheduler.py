"""What a step costs the engine core's host: `tokenmill bench scheduler` runs this module.

Every request decodes; one in `block_size` needs a new block and completes one in each step, as in steady traffic. The
device costs nothing. What is measured is the CPU time of one turn of the engine's loop: deciding, applying,
committing, learning from the step's time, metrics and packing; of that, what a worker prepares on the host for each
step; and, beside it, the encoding of the messages, which another thread does.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

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
from tokenmill_engine.messages import AddRequest, Hello, SamplingParams
from tokenmill_engine.outputs import KVCapacity, StepPlan, StepResult, TokenMasks
from tokenmill_engine.worker.inputs import CpuPreparer
from tokenmill_engine.worker.slots import SlotShape, SlotTables
from tokenmill_engine.worker.step_ring import StepRing

_VOCAB_SIZE = 49152
_MAX_MODEL_LEN = 8192
_MAX_TOKENS = 8192
_BLOCK_SIZE = 16
_TOKEN = 5
_WARM_UP_STEPS = 50
_STEP_S = 0.02
"""What the device says each step took: there is something to learn from."""

Prepare = Callable[[StepPlan], None]


@dataclass(slots=True, frozen=True)
class Load:
    """What the engine core has to do."""

    num_seqs: int
    num_steps: int
    num_clients: int
    """API servers, which are told the load and own the requests in turn."""
    log_stats: bool
    data_parallel_size: int
    """Engine cores that they choose from: where it is more than one, this one publishes its blocks."""


class FreeDevice:
    """An executor whose device costs nothing: it prepares a step, and samples the same token in every row."""

    def __init__(self, prepare: Prepare) -> None:
        self._prepare = prepare
        self.prepared_s = 0.0
        """CPU time spent on preparation."""

    def submit(self, plan: StepPlan) -> "FreeStep":
        started = time.thread_time()
        self._prepare(plan)
        self.prepared_s += time.thread_time() - started
        return FreeStep(plan)

    def mask(self, masks: TokenMasks | None) -> None:
        """No request here has a grammar."""

    def shutdown(self) -> None:
        """Nothing is held."""


class FreeStep:
    """A step that is done."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan

    def result(self) -> StepResult:
        plan = self._plan
        token_ids = np.where(plan.samples, _TOKEN, -1).astype(np.int32)[:, np.newaxis]
        return StepResult(plan.step, token_ids, plan.samples.astype(np.int32), elapsed_s=_STEP_S)


def make_preparation(kind: str, num_seqs: int) -> Prepare:
    """The host's part of a worker's preparation: `gpu`, `cpu` or `none`."""
    if kind == "none":
        return lambda plan: None
    num_blocks = -(-_MAX_MODEL_LEN // _BLOCK_SIZE)
    tables = SlotTables(SlotShape(num_seqs, _MAX_MODEL_LEN, num_blocks, 1, _VOCAB_SIZE), torch.device("cpu"))
    if kind == "gpu":
        ring = StepRing(num_seqs, tables.device)

        def stage(plan: StepPlan) -> None:
            # What an entry has no room for, at the arrival of many requests, would need a device to go to.
            ring.begin().write(plan, tables.changes(plan))
            ring.count()

        return stage
    preparer = CpuPreparer(tables, _BLOCK_SIZE)

    def prepare(plan: StepPlan) -> None:
        tables.apply(plan)
        inputs = preparer.prepare(plan)
        tokens = torch.full((len(inputs.rows.sample_slots),), _TOKEN, dtype=torch.int32)
        preparer.advance(plan, inputs.rows, tokens)

    return prepare


def engine_config(load: Load) -> EngineConfig:
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
        name="none",
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
        cache=CacheConfig(block_size=_BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_seqs=load.num_seqs, max_num_batched_tokens=_MAX_TOKENS),
        observability=ObservabilityConfig(model_name="none", log_stats=load.log_stats),
        data_parallel_size=load.data_parallel_size,
    )


def start_core(load: Load, device: FreeDevice) -> EngineCore:
    """An engine core in which all requests decode."""
    capacity = KVCapacity(
        num_blocks=load.num_seqs * (load.num_steps + _WARM_UP_STEPS + 600) // _BLOCK_SIZE,
        block_size=_BLOCK_SIZE,
        max_model_len=_MAX_MODEL_LEN,
        kv_cache_bytes=0,
        groups=group_layers([KVSpec("full", 1, 64, "bfloat16")]),
        attention_backend="none",
        phases={},
        prefill_costs=tuple((256 << power, _STEP_S * (1 + 2**power) / 4) for power in range(6)),
    )
    core = EngineCore(engine_config(load), device, capacity)
    for client in range(load.num_clients):
        core.handle(Hello(client))
    generator = np.random.default_rng(0)
    for index in range(load.num_seqs):
        prompt = generator.integers(10, _VOCAB_SIZE, size=64 + index % 16, dtype=np.int32)
        sampling = SamplingParams(max_tokens=_MAX_MODEL_LEN - 128, temperature=0.0)
        request_id = make_request_id(index % load.num_clients, 0, index)
        core.handle(AddRequest(request_id, "bench", prompt.tobytes(), sampling, 0.0))
    while core.scheduler.load.num_waiting:
        core.step()
    for _ in range(_WARM_UP_STEPS):
        core.step()
    return core


def run(load: Load, preparation: str) -> dict[str, float]:
    """Microseconds of CPU: `step_*` of a turn of the loop, `prepare_mean` of it in the worker, `encode_mean` beside."""
    device = FreeDevice(make_preparation(preparation, load.num_seqs))
    core = start_core(load, device)
    encoder = msgspec.msgpack.Encoder()
    device.prepared_s = 0.0
    steps, encoding = [], []
    for _ in range(load.num_steps):
        started = time.thread_time()
        outputs = core.step()
        stepped = time.thread_time()
        for _, message in outputs:
            encoder.encode(message)
        steps.append(stepped - started)
        encoding.append(time.thread_time() - stepped)
    core.shutdown()
    return {
        "step_us_median": float(np.median(steps)) * 1e6,
        "step_us_mean": float(np.mean(steps)) * 1e6,
        "step_us_p99": float(np.percentile(steps, 99)) * 1e6,
        "prepare_us_mean": device.prepared_s / load.num_steps * 1e6,
        "encode_us_mean": float(np.mean(encoding)) * 1e6,
    }


def main() -> None:
    """Writes one line of JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--num-steps", type=int, default=2000)
    parser.add_argument("--num-clients", type=int, default=1)
    parser.add_argument("--preparation", choices=["gpu", "cpu", "none"], default="gpu")
    parser.add_argument("--data-parallel-size", type=int, default=1)
    parser.add_argument("--disable-log-stats", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = Load(
        options.num_seqs,
        options.num_steps,
        options.num_clients,
        not options.disable_log_stats,
        options.data_parallel_size,
    )
    result = run(load, options.preparation)
    sys.stdout.write(json.dumps({name: round(value, 1) for name, value in result.items()}) + "\n")


if __name__ == "__main__":
    main()
