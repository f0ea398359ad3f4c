"""Results of a step on their way from the device to the host."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.outputs import NO_TOKEN_LEFT, LogprobRows, StepPlan, StepResult, without_images
from tokenmill_engine.sampling.logprobs import Logprobs
from tokenmill_engine.sampling.tokens import INVALID_TOKEN
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.pooling import with_vectors


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What is known of a step that is done, in seconds; 0 for what nobody measured."""

    elapsed_s: float = 0.0
    """On the device; of a model in stages, in the slowest one so far."""
    encoder_s: float = 0.0
    """That a stage before this one encoded media in."""


class HostTokens(Protocol):
    """Sampled tokens that are on their way."""

    def wait(self) -> tuple[NDArray[np.int32], StepTimes]:
        """[num_samples] tokens, and what the step took; blocks until it is done."""


@dataclass(slots=True)
class ScoredRows:
    """Log-probabilities that belong to `rows` of the plan: `counts[i]` consecutive positions, `num_top[i]` wide."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_top: NDArray[np.int32]
    scores: Logprobs

    def to_host(self) -> "ScoredRows":
        """The same on the host, once the device got there."""
        scores = self.scores
        copies = Logprobs(to_host(scores.token_ids), to_host(scores.logprobs), to_host(scores.ranks))
        return ScoredRows(self.rows, self.counts, self.num_top, copies)

    def split(self) -> dict[int, LogprobRows]:
        """By row; the scores must be on the host."""
        token_ids, logprobs = self.scores.token_ids.numpy(), self.scores.logprobs.numpy()
        ranks = self.scores.ranks.numpy()
        result: dict[int, LogprobRows] = {}
        start = 0
        for row, count, num_top in zip(self.rows.tolist(), self.counts.tolist(), self.num_top.tolist(), strict=True):
            part = slice(start, start + count)
            width = 1 + num_top
            result[row] = LogprobRows(token_ids[part, :width], logprobs[part, :width], ranks[part])
            start += count
        return result


class PendingResult:
    """A step whose device work is under way. The log-probabilities are on their way to the host."""

    def __init__(
        self,
        plan: StepPlan,
        rows: StepRows,
        tokens: HostTokens,
        logprobs: ScoredRows | None,
        prompt_logprobs: ScoredRows | None,
        vectors: torch.Tensor | None = None,
    ) -> None:
        """`vectors`: those of the sampling rows, float32 [num_samples, size], on their way to the host as well."""
        self._plan = plan
        self._sample_rows = rows.sample_rows
        self._missing = rows.missing
        self._encoder_time = rows.encoder_time
        self._tokens = tokens
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._vectors = vectors

    def wait(self) -> StepResult:
        """Blocks until the device is done with the step. Call it once."""
        sampled, times = self._tokens.wait()
        token_ids = np.full((self._plan.num_reqs, 1), INVALID_TOKEN, np.int32)
        token_ids[self._sample_rows, 0] = sampled
        num_new = (token_ids[:, 0] >= 0).astype(np.int32)
        logprobs = self._logprobs.split() if self._logprobs is not None else {}
        prompt_logprobs = self._prompt_logprobs.split() if self._prompt_logprobs is not None else {}
        failed = [row for row, scores in prompt_logprobs.items() if np.isnan(scores.logprobs[:, 0]).any()]
        if len(self._sample_rows) != int(num_new.sum()):
            failed += self._sample_rows[num_new[self._sample_rows] == 0].tolist()
        errors = dict.fromkeys(failed, NO_TOKEN_LEFT)
        for row in errors:
            num_new[row] = 0
            logprobs.pop(row, None)
            prompt_logprobs.pop(row, None)
        result = StepResult(
            step=self._plan.step,
            token_ids=token_ids,
            num_new=num_new,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=errors,
            elapsed_s=times.elapsed_s,
            encoder_s=self._encoder_time.seconds() if self._encoder_time is not None else times.encoder_s,
        )
        if self._vectors is not None:
            result = with_vectors(result, self._sample_rows, self._vectors.numpy())
        return result if self._missing is None else without_images(result, [self._missing.told(self._plan.step)])


def without_tokens(plan: StepPlan, elapsed_s: float = 0.0) -> StepResult:
    """The result of `plan` in a stage that samples nothing."""
    no_tokens = np.full((plan.num_reqs, 1), INVALID_TOKEN, np.int32)
    return StepResult(plan.step, no_tokens, np.zeros(plan.num_reqs, np.int32), elapsed_s=elapsed_s)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in pinned memory, valid once the stream got there; a CPU tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
