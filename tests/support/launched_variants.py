"""Lists the variants of kernels that steps launch, as on a GPU, where there is none: nothing is compiled or computed.

A program of its own, since it makes all of torch believe that tensors are on a GPU: `python -m
tests.support.launched_variants MAX_NUM_SEQS MAX_TOKENS eager|graphs whole|first|last|shared|FAMILY` prints what steps
of many kinds launch and the rehearsal of the start does not, one variant a line, and at last how many variants the
rehearsal launches. The last argument says which stage of the model runs them, or that two workers share all of it; or
it names a family of models that look at images.
"""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget

from tests.support.model_loading import CPU, model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.config.stages import share_layers, whole_model
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.distributed.nccl_group import Collectives, NcclGroup
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.models.loader import build_model
from tokenmill_engine.outputs import StepMedia, StepPlan
from tokenmill_engine.sampling import sampler
from tokenmill_engine.sampling.device import DeviceSampler
from tokenmill_engine.worker import model_runner, results
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.cuda_media import media_of
from tokenmill_engine.worker.cuda_rehearsal import CudaRehearsal
from tokenmill_engine.worker.cuda_stages import CudaRelay
from tokenmill_engine.worker.cuda_steps import CudaSteps, steps_of
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal, black_image, image_plan
from tokenmill_engine.worker.rehearsal import UNUSUAL, RehearsalPlans, rehearsal_plan
from tokenmill_engine.worker.shapes import Ladder
from tokenmill_engine.worker.slots import SlotShape, SlotTables
from tokenmill_kernels import ops
from tokenmill_kernels.gpu.compilation import compile_ahead

BLOCK_SIZE, MAX_LEN = 16, 512
GREEDY = SamplingParams(temperature=0.0, seed=0)
SCORED = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
SAMPLED = (
    SamplingParams(temperature=1.0, seed=0),
    SamplingParams(temperature=1.0, seed=0, top_p=0.9, logprobs=20),
    SamplingParams(temperature=0.0, seed=0, frequency_penalty=0.5),
    *UNUSUAL,
)
CHUNKS: tuple[tuple[int, ...], ...] = ((2,), (5,), (17,), (40,), (65,), (130,), (500, 500), (12,) * 40)
NUM_DECODES = (0, 1, 9, 48, 60)
MROPE: tuple[MediaFamily, ...] = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MEDIA_FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_onevision", *MROPE)
IMAGE_SIZES = (1, 2, 3, 5, 9, 15, 17, 33, 40, 64, 65, 130)
"""Tokens."""
IMAGE_COUNTS = (2, 3, 4, 5, 7)
"""Images of a step that are encoded together."""


def pretend_to_have_a_gpu() -> None:
    """Also where tensors are made by the host, so this comes after all that pins memory."""
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment, method-assign]
    torch.mm = lambda a, b, out_dtype=None: torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "NVIDIA H100"
    torch.cuda.synchronize = lambda device=None: None
    results.to_host = model_runner.to_host = lambda tensor: tensor
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )


def sample_on_device(steps: CudaSteps) -> None:
    """Lets the sampler of `steps` work as on a GPU."""
    tables = steps.inputs.tables
    steps.chooser._sampler._device = DeviceSampler(tables.sampling, tables.tokens)
    initialize = sampler.SamplingBatch.__init__

    def with_slots(batch: Any, slots: Any, table: Any) -> None:
        initialize(batch, slots, table)
        batch.slots = torch.from_numpy(slots.copy())

    sampler.SamplingBatch.__init__ = with_slots  # type: ignore[method-assign]


def one_of_two() -> NcclGroup:
    """A worker that takes itself for the other one too. With few tokens sums go one way through its memory, with more
    another one, and with many through NCCL."""
    host = SimpleNamespace(rank=0, size=2)
    peers = PeerReduce(0, 2, CPU, lambda data: [data, data], max_bytes=64 << 10, one_shot_bytes=16 << 10)
    return NcclGroup(cast(Group, host), cast(Collectives, None), peers)


def config_of(max_num_seqs: int, max_tokens: int, part: str) -> EngineConfig:
    if part in MEDIA_FAMILIES:
        folder = cached_tiny_media_model(cast(MediaFamily, part))
    else:
        folder = cached_tiny_model("llama", num_attention_heads=4, num_key_value_heads=2)
    return EngineConfig(
        replace(model_config(folder, dtype="bfloat16"), max_model_len=MAX_LEN),
        CacheConfig(BLOCK_SIZE),
        SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
    )


def make_steps(engine_config: EngineConfig, ladder: Ladder | None, part: str, group: Group) -> CudaSteps | CudaRelay:
    config, scheduler = engine_config.model, engine_config.scheduler
    max_num_seqs, max_tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
    num_layers = config.architecture.num_layers
    stages = share_layers(num_layers, 2)
    stage = {"first": stages[0], "last": stages[1]}.get(part, whole_model(num_layers))
    model = build_model(config, CPU, group=group, stage=stage)
    shape = SlotShape(max_num_seqs, MAX_LEN, MAX_LEN // BLOCK_SIZE, 1, model.architecture.vocab_size, part in MROPE)
    num_rows = Ladder(max_num_seqs, max_tokens).num_rows
    tables = SlotTables(shape, CPU, shared=False)
    inputs = CudaInputs(tables, BLOCK_SIZE, num_rows, max_tokens)
    steps = steps_of(model, inputs, SimpleNamespace(replay=lambda key: None), ladder, 2)
    steps.media = media_of(model, engine_config, tables)
    steps.kv_caches = [
        ops.allocate_kv_cache(1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim, model.dtype, CPU)
        for spec in model.kv_specs
    ]
    return steps


def plans(max_num_seqs: int, max_tokens: int) -> Iterator[StepPlan]:
    """Steps of decodes and chunks, within the limits, all requests with the same parameters."""
    steps = [(num_decodes, chunks, GREEDY) for num_decodes in NUM_DECODES for chunks in ((), *CHUNKS)]
    steps += [(num_decodes, chunks, SCORED) for num_decodes in NUM_DECODES for chunks in CHUNKS]
    steps += [(num_decodes, (), sampling) for num_decodes in (1, 9, 17, 33, 65) for sampling in SAMPLED]
    for num_decodes, chunks, sampling in steps:
        counts = np.array([1] * num_decodes + list(chunks), np.int32)
        if 0 < len(counts) <= max_num_seqs and counts.sum() <= max_tokens:
            plan = rehearsal_plan(len(counts), int(counts.max()), 1, BLOCK_SIZE, sampling)
            yield replace(plan, num_scheduled=counts, num_decodes=num_decodes)


def image_plans(media: MediaConfig, max_tokens: int) -> Iterator[StepPlan]:
    """Steps with an image and some tokens of it, or more than those; and steps that encode several images."""
    for size in IMAGE_SIZES:
        for num_tokens in (2, size // 2, size + 3):
            if 2 <= num_tokens <= max_tokens:
                yield image_plan(black_image(media, size), num_tokens, 1, BLOCK_SIZE)
        for count in IMAGE_COUNTS:
            plan = image_plan(black_image(media, size), 2, 1, BLOCK_SIZE)
            images = [black_image(media, size, entry) for entry in range(count)]
            yield replace(plan, media=StepMedia([], images, []))


def main() -> None:
    max_num_seqs, max_tokens = int(sys.argv[1]), int(sys.argv[2])
    config = config_of(max_num_seqs, max_tokens, sys.argv[4])
    media = config.model.media
    ladder = Ladder(max_num_seqs, max_tokens)
    group, silence = ALONE, contextlib.nullcontext()
    if sys.argv[4] == "shared":
        group = one_of_two()
        silence = group.silence()
    steps = make_steps(config, None if sys.argv[3] == "eager" else ladder, sys.argv[4], group)
    pretend_to_have_a_gpu()
    if isinstance(steps, CudaSteps):
        sample_on_device(steps)
    variants: set[str] = set()
    found: list[str] = []

    def instead_of_compiling(*, key: Any, repr: str, **_: Any) -> bool:
        variant = f"{repr} {key}"
        if variant not in variants:
            variants.add(variant)
            found.append(variant)
        return True

    triton.knobs.runtime.jit_cache_hook = instead_of_compiling
    limits = RehearsalPlans(max_num_seqs, max_tokens, MAX_LEN, 1, BLOCK_SIZE)
    images = None if media is None else MediaRehearsal(config, media, 1)
    rehearsal = CudaRehearsal(steps, ladder, limits, images)
    runner = steps.runner()
    with torch.inference_mode(), silence:
        compile_ahead(rehearsal.to_compile(), CPU)
        num_rehearsed = len(found)
        with_images = () if media is None else image_plans(media, max_tokens)
        for plan in (*plans(max_num_seqs, max_tokens), *with_images):
            steps.inputs.ring.clear()
            compile_ahead([lambda plan=plan: runner.execute(plan)], CPU)  # type: ignore[misc]
    sys.stdout.write("".join(f"{line}\n" for line in (*found[num_rehearsed:], num_rehearsed)))


if __name__ == "__main__":
    main()
