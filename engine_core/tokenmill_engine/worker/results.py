"""Results of a step on their way from the device to the host."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.outputs import LogprobRows, StepPlan, StepResult
from tokenmill_engine.sampling.logprobs import Logprobs
from tokenmill_engine.sampling.tokens import INVALID_TOKEN

_INVALID_MESSAGE = "the model gave no usable probabilities for a token (not a number, or every token excluded)"


@dataclass(slots=True)
class ScoredRows:
    """Log-probabilities that belong to `rows` of the plan: `counts[i]` consecutive positions, `num_top[i]` wide."""

    rows: NDArray[np.int64]
    counts: NDArray[np.int64]
    num_top: NDArray[np.int32]
    scores: Logprobs

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
    """A step whose device work is under way."""

    def __init__(
        self,
        plan: StepPlan,
        sample_rows: NDArray[np.int64],
        token_ids: torch.Tensor,
        logprobs: ScoredRows | None,
        prompt_logprobs: ScoredRows | None,
    ) -> None:
        """Starts the copies to the host. `token_ids` are int32 [num_samples]."""
        self._plan = plan
        self._sample_rows = sample_rows
        self._token_ids = _to_host(token_ids)
        self._logprobs = _scores_to_host(logprobs)
        self._prompt_logprobs = _scores_to_host(prompt_logprobs)
        self._copied: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> StepResult:
        """Blocks until the device is done with the step."""
        if self._copied is not None:
            self._copied.synchronize()
        num_reqs = self._plan.num_reqs
        token_ids = np.full((num_reqs, 1), INVALID_TOKEN, np.int32)
        token_ids[self._sample_rows, 0] = self._token_ids.numpy()
        num_new = (token_ids[:, 0] >= 0).astype(np.int32)
        logprobs = self._logprobs.split() if self._logprobs is not None else {}
        prompt_logprobs = self._prompt_logprobs.split() if self._prompt_logprobs is not None else {}
        failed = [row for row, scores in prompt_logprobs.items() if np.isnan(scores.logprobs[:, 0]).any()]
        if len(self._sample_rows) != int(num_new.sum()):
            failed += self._sample_rows[num_new[self._sample_rows] == 0].tolist()
        for row in failed:
            num_new[row] = 0
            logprobs.pop(row, None)
            prompt_logprobs.pop(row, None)
        return StepResult(
            step=self._plan.step,
            token_ids=token_ids,
            num_new=num_new,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            errors=dict.fromkeys(failed, _INVALID_MESSAGE),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in pinned memory, valid once the stream got there; a CPU tensor itself."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _scores_to_host(scored: ScoredRows | None) -> ScoredRows | None:
    if scored is not None:
        scores = scored.scores
        scored.scores = Logprobs(_to_host(scores.token_ids), _to_host(scores.logprobs), _to_host(scores.ranks))
    return scored
