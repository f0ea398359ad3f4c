"""A worker of a text encoder: whole texts in, vectors out. There are no caches and no slots: all of a text comes with
the plan that computes it. On a GPU steps run kernel by kernel, without CUDA graphs."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.pooling import PoolingKind
from tokenmill_engine.models.bert import BertEncoder
from tokenmill_engine.models.text_batch import TextBatch, make_batch
from tokenmill_engine.outputs import StepPlan, StepResult, TokenMasks
from tokenmill_engine.worker.pooling import vector_result
from tokenmill_engine.worker.results import to_host

_WARM_UP_TOKENS = 32


def claim_device(config: EngineConfig, device_index: int) -> torch.device:
    """Where the model goes; from now on this process computes there."""
    if config.device.kind == "cpu":
        torch.set_num_threads(config.device.num_threads)
        return torch.device("cpu")
    device = torch.device("cuda", device_index)
    torch.cuda.set_device(device)
    torch.set_num_threads(1)
    return device


class TextEncoderRunner:
    """Carries plans out. Every row of a plan starts in it, and ends with it."""

    def __init__(self, model: BertEncoder, kind: PoolingKind) -> None:
        self._model = model
        self._pool = _POOLS[kind]

    def warm_up(self) -> None:
        """Run once: libraries prepare what they need."""
        longest = self._model.architecture.max_position_embeddings
        self._encode([np.zeros(min(_WARM_UP_TOKENS, longest), np.int32)], [0]).cpu()

    def launch(self, plan: StepPlan) -> "_PendingVectors":
        """As `Runner`."""
        return self.execute(plan)

    def execute(self, plan: StepPlan) -> "_PendingVectors":
        """Enqueue one step."""
        started = time.perf_counter()
        started_in = {start.slot: start for start in plan.starts}
        rows = [started_in[slot] for slot in plan.slots.tolist()]
        vectors = self._encode([row.token_ids for row in rows], [row.second_text for row in rows])
        if not vectors.is_cuda:
            return _PendingVectors(plan, vectors, started, None)
        host = to_host(vectors)
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return _PendingVectors(plan, host, started, done.synchronize)

    @torch.inference_mode()
    def _encode(self, texts: Sequence[NDArray[np.int32]], seconds: Sequence[int]) -> torch.Tensor:
        """float32 [num_texts, hidden_size], or the scores [num_texts, 1]. `seconds`: as in `AddRequest`."""
        begins = [second or len(text) for text, second in zip(texts, seconds, strict=True)]
        batch = make_batch(texts, begins, self._model.device)
        hidden = self._model.forward(batch)
        return (
            self._model.score(hidden[batch.firsts]).float() if self._model.scores_pairs else self._pool(hidden, batch)
        )


class _PendingVectors:
    def __init__(
        self, plan: StepPlan, vectors: torch.Tensor, started: float, synchronize: Callable[[], None] | None
    ) -> None:
        self._plan, self._vectors, self._started, self._synchronize = plan, vectors, started, synchronize

    def choose(self, masks: TokenMasks | None) -> "_PendingVectors":
        """As `LaunchedStep`: nothing is chosen here."""
        return self

    def wait(self) -> StepResult:
        if self._synchronize is not None:
            self._synchronize()
        elapsed_s = time.perf_counter() - self._started
        return vector_result(self._plan, self._vectors.numpy(), elapsed_s)


def _mean(hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
    sums = torch.zeros((len(batch.lengths), hidden.shape[1]), dtype=torch.float32, device=hidden.device)
    return sums.index_add_(0, batch.text_of_token, hidden.float()) / batch.lengths[:, None]


def _first(hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
    return hidden[batch.firsts].float()


def _last(hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
    return hidden[batch.firsts + batch.lengths - 1].float()


_POOLS: dict[PoolingKind, Callable[[torch.Tensor, TextBatch], torch.Tensor]] = {
    "mean": _mean,
    "cls": _first,
    "last": _last,
}
