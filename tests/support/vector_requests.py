"""Engine cores whose models make vectors, and what transformers makes of the same texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.core_requests import CoreRequests
from tests.support.embedding_models import tiny_bert, tiny_cross_encoder
from tests.support.model_loading import model_config
from tests.support.tiny_models import VOCAB_SIZE
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, DeviceKind, EngineConfig, SchedulerConfig
from tokenmill_engine.config.pooling import PoolingConfig, PoolingKind
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import SamplingParams

NOTHING = SamplingParams(max_tokens=0)

Vector = NDArray[np.float32]


@contextmanager
def requests_to(
    folder: Path, kind: PoolingKind, scheduler: SchedulerConfig, cache: CacheConfig, device: DeviceKind
) -> Iterator[CoreRequests]:
    model = replace(model_config(folder), pooling=PoolingConfig(kind))
    if model.architecture.text_encoder is not None:
        model = replace(model, max_model_len=model.architecture.max_position_embeddings)
    config = EngineConfig(model=model, cache=cache, scheduler=scheduler, device=DeviceConfig(kind=device))
    executor = UniprocExecutor(config)
    try:
        yield CoreRequests(config, executor, executor.initialize())
    finally:
        executor.shutdown()


@contextmanager
def encoder(
    kind: PoolingKind = "mean",
    num_slots: int = 4,
    budget: int = 128,
    device: DeviceKind = "cpu",
    scores_pairs: bool = False,
) -> Iterator[CoreRequests]:
    scheduler = SchedulerConfig(max_num_seqs=num_slots, max_num_batched_tokens=budget, whole_prompts=True)
    cache = CacheConfig(enable_prefix_caching=False)
    with requests_to(tiny_cross_encoder() if scores_pairs else tiny_bert(), kind, scheduler, cache, device) as requests:
        yield requests


@contextmanager
def decoder(folder: Path, budget: int = 16, device: DeviceKind = "cpu") -> Iterator[CoreRequests]:
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget)
    cache = CacheConfig(block_size=16, num_gpu_blocks_override=64)
    with requests_to(folder, "last", scheduler, cache, device) as requests:
        yield requests


@cache
def _reference(folder: Path) -> Any:
    import transformers

    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def states(folder: Path, token_ids: list[int]) -> Vector:
    """[num_tokens, hidden_size]: final hidden states of a text by transformers, on the CPU."""
    with torch.no_grad():
        hidden = _reference(folder)(torch.tensor([token_ids])).last_hidden_state[0]
    return np.asarray(hidden.numpy())


def score(token_ids: list[int], second_text: int) -> float:
    """Of a pair by transformers, on the CPU."""
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_cross_encoder(), dtype=torch.float32)
    kinds = [int(index >= second_text) for index in range(len(token_ids))]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([token_ids]), token_type_ids=torch.tensor([kinds])).logits
    return float(logits[0, 0])


def texts(*lengths: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(VOCAB_SIZE, size=length).tolist() for length in lengths]


def relative_error(ours: Vector, expected: Vector) -> float:
    return float(np.abs(ours - expected).max() / np.abs(expected).max())
