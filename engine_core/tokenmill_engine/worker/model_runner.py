"""Executes step plans: slots, inputs, forward pass, sampling, and the sampled tokens back into the slots.

A step only enqueues device work; on CUDA nothing in it waits for the device. The next step can follow at once, since
the tokens it needs are in the slots by then.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.sampling.logprobs import Logprobs, RawScores
from tokenmill_engine.sampling.sampler import Sampled, Sampler
from tokenmill_engine.worker.inputs import StepInputs, StepPreparer
from tokenmill_engine.worker.results import PendingResult, ScoredRows
from tokenmill_engine.worker.slots import SlotTables

Forward = Callable[[ForwardBatch, torch.Tensor | None], torch.Tensor]
"""Runs the model: hidden states of all tokens, or of the given ones (int32, ascending), valid until the next call."""

_SCORE_PIECE_ELEMENTS = 1 << 24
"""Bound on the logits that exist at once while prompts are scored."""


class ModelRunner:
    """The order of things in a step. Tables, caches and model belong to the worker."""

    def __init__(self, model: DenseDecoder, forward: Forward, tables: SlotTables, preparer: StepPreparer) -> None:
        self._model = model
        self._forward = forward
        self._tables = tables
        self._preparer = preparer
        self._sampler = Sampler(tables.sampling, tables.tokens)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> PendingResult:
        """Enqueue one step."""
        self._tables.apply(plan)
        inputs = self._preparer.prepare(plan)
        scored = self._scored_tokens(plan)
        if scored is None:
            hidden = self._forward(inputs.batch, inputs.logit_index)
            prompt_logprobs = None
        else:
            hidden = self._forward(inputs.batch, None)
            prompt_logprobs = self._score_prompts(plan, inputs, hidden, scored)
            hidden = hidden if inputs.logit_index is None else hidden.index_select(0, inputs.logit_index)
        sampled = self._sample(hidden, inputs)
        self._preparer.advance(plan, inputs, sampled.token_ids)
        return PendingResult(plan, inputs.sample_rows, sampled.token_ids, self._own(inputs, sampled), prompt_logprobs)

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> Sampled:
        """One token for each sampling row, from its `hidden` state (padding may follow)."""
        if len(inputs.sample_rows) == 0:
            return Sampled(torch.empty(0, dtype=torch.int32, device=hidden.device))
        rows = hidden[: len(inputs.sample_rows)]
        if not self._sampler.batch(inputs.sample_slots).any_feature:
            return Sampled(self._model.argmax_token(rows).to(torch.int32))
        return self._sampler.sample(self._model.compute_logits(rows), inputs.sample_slots, inputs.max_tokens)

    def _own(self, inputs: StepInputs, sampled: Sampled) -> ScoredRows | None:
        """Log-probabilities of the sampled tokens, by row of the plan."""
        if sampled.logprobs is None or sampled.logprob_rows is None:
            return None
        slots = inputs.sample_slots[sampled.logprob_rows]
        return ScoredRows(
            rows=inputs.sample_rows[sampled.logprob_rows],
            counts=np.ones(len(slots), np.int64),
            num_top=self._tables.sampling.num_logprobs[slots],
            scores=sampled.logprobs,
        )

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
        self, plan: StepPlan, inputs: StepInputs, hidden: torch.Tensor, counts: NDArray[np.int64]
    ) -> ScoredRows:
        """Log-probabilities of the prompt tokens that follow the first `counts` tokens of each row."""
        rows = np.flatnonzero(counts)
        num_top = self._tables.sampling.num_prompt_logprobs[plan.slots[rows]]
        widest = int(num_top.max())
        scores: list[Logprobs] = []
        for row in rows.tolist():
            start, first_next = int(inputs.query_start[row]), int(plan.num_computed[row]) + 1
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


def _concatenate(scores: list[Logprobs]) -> Logprobs:
    if len(scores) == 1:
        return scores[0]
    return Logprobs(
        token_ids=torch.cat([score.token_ids for score in scores]),
        logprobs=torch.cat([score.logprobs for score in scores]),
        ranks=torch.cat([score.ranks for score in scores]),
    )
