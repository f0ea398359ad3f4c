"""Executes step plans: slots, inputs, forward pass, sampling, and the sampled tokens back into the slots.

A step only enqueues device work; on CUDA nothing in it waits for the device. The next step can follow at once, since
the tokens it needs are in the slots by then.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.outputs import StepPlan, TokenMasks
from tokenmill_engine.sampling.logprobs import Logprobs, RawScores
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.sampler import Sampled
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.results import HostTokens, PendingResult, ScoredRows, to_host
from tokenmill_engine.worker.slots import SlotTables

_SCORE_PIECE_ELEMENTS = 1 << 24
"""Bound on the logits that exist at once while prompts are scored."""


@dataclass(slots=True)
class Hidden:
    """Normed hidden states [.., hidden_size], valid until the next step."""

    chosen: torch.Tensor
    """Of the tokens that decide, one for each sampling row; padding may follow."""
    every: torch.Tensor | None = None
    """Of all tokens, if they were asked for."""


class DeviceStep(Protocol):
    """One step under way. Called in the order of the methods."""

    rows: StepRows

    def forward(self, every_token: bool) -> Hidden:
        """Run the model."""

    def sample(self, hidden: Hidden, masks: SampleMasks | None) -> Sampled:
        """Choose tokens that `masks` allow, count the plan's as computed and append the chosen ones to the slots."""

    def finish(self, sampled: Sampled) -> HostTokens:
        """Send the sampled tokens to the host. All of the step's work is enqueued by now."""


class StepDevice(Protocol):
    """Carries steps out on one kind of device."""

    def begin(self, plan: StepPlan) -> DeviceStep:
        """Write what the plan brings into the slots and prepare its inputs. Raises ValueError if it is too large."""


class ModelRunner:
    """The order of things in a step. Tables, caches and model belong to the worker."""

    def __init__(self, model: DenseDecoder, tables: SlotTables, device: StepDevice) -> None:
        self._model = model
        self._tables = tables
        self._device = device

    def execute(self, plan: StepPlan) -> PendingResult:
        """Enqueue one step."""
        return self.launch(plan).choose(plan.masks)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "UnchosenStep":
        """As `Runner`."""
        step = self._device.begin(plan)
        scored = self._scored_tokens(plan)
        hidden = step.forward(every_token=scored is not None)
        prompt_logprobs = None
        if scored is not None and hidden.every is not None:
            prompt_logprobs = self._score_prompts(plan, step.rows, hidden.every, scored).to_host()
        vectors = None
        if self._model.makes_vectors:
            vectors = to_host(hidden.chosen[: len(step.rows.sample_rows)].to(torch.float32, copy=True))
        return UnchosenStep(plan, step, hidden, self._tables.sampling.num_logprobs, prompt_logprobs, vectors)

    def _scored_tokens(self, plan: StepPlan) -> NDArray[np.int64] | None:
        """[num_reqs] how many of the row's tokens score the prompt token after them; None if none does."""
        num_top = self._tables.sampling.num_prompt_logprobs[plan.slots]
        if num_top.max() < 0:
            return None
        # The last token of the prompt has no prompt token after it.
        left = self._tables.num_prompt[plan.slots] - 1 - plan.num_computed
        counts = np.where(num_top >= 0, np.minimum(plan.num_scheduled, left).clip(min=0), 0).astype(np.int64)
        return counts if counts.any() else None

    def _score_prompts(
        self, plan: StepPlan, step_rows: StepRows, hidden: torch.Tensor, counts: NDArray[np.int64]
    ) -> ScoredRows:
        """Log-probabilities of the prompt tokens that follow the first `counts` tokens of each row."""
        rows = np.flatnonzero(counts)
        num_top = self._tables.sampling.num_prompt_logprobs[plan.slots[rows]]
        widest = int(num_top.max())
        scores: list[Logprobs] = []
        for row in rows.tolist():
            start, first_next = int(step_rows.query_start[row]), int(plan.num_computed[row]) + 1
            next_ids = self._tables.tokens.token_ids[int(plan.slots[row]), first_next:]
            scores += self._score_row(hidden[start : start + int(counts[row])], next_ids, widest)
        return ScoredRows(rows, counts[rows], num_top, _concatenate(scores))

    def _score_row(self, hidden: torch.Tensor, next_ids: torch.Tensor, num_top: int) -> list[Logprobs]:
        """Scores of the first `len(hidden)` of `next_ids`, in pieces of bounded memory."""
        size = max(1, _SCORE_PIECE_ELEMENTS // self._tables.shape.vocab_size)
        return [
            RawScores(self._model.compute_logits(piece)).score(
                next_ids[start : start + len(piece)].to(torch.int64), num_top
            )
            for start, piece in ((start, hidden[start : start + size]) for start in range(0, len(hidden), size))
        ]


@dataclass(slots=True)
class UnchosenStep:
    """A step whose hidden states are on their way. As `LaunchedStep`."""

    plan: StepPlan
    step: DeviceStep
    hidden: Hidden
    num_logprobs: NDArray[np.int32]
    """[num_slots]"""
    prompt_logprobs: ScoredRows | None
    vectors: torch.Tensor | None
    """On their way to the host, as in `PendingResult`."""

    @torch.inference_mode()
    def choose(self, masks: TokenMasks | None) -> PendingResult:
        """As `LaunchedStep`."""
        rows = self.step.rows
        sampled = self.step.sample(self.hidden, SampleMasks.of(masks, rows.sample_rows))
        logprobs = self._own(rows, sampled)
        return PendingResult(self.plan, rows, self.step.finish(sampled), logprobs, self.prompt_logprobs, self.vectors)

    def _own(self, rows: StepRows, sampled: Sampled) -> ScoredRows | None:
        """Log-probabilities of the sampled tokens, by row of the plan."""
        if sampled.logprobs is None or sampled.logprob_rows is None:
            return None
        slots = rows.sample_slots[sampled.logprob_rows]
        return ScoredRows(
            rows=rows.sample_rows[sampled.logprob_rows],
            counts=np.ones(len(slots), np.int64),
            num_top=self.num_logprobs[slots],
            scores=sampled.logprobs,
        ).to_host()


def _concatenate(scores: list[Logprobs]) -> Logprobs:
    if len(scores) == 1:
        return scores[0]
    return Logprobs(
        token_ids=torch.cat([score.token_ids for score in scores]),
        logprobs=torch.cat([score.logprobs for score in scores]),
        ranks=torch.cat([score.ranks for score in scores]),
    )
