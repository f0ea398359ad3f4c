"""Compares what `LLM` says with the float32 reference, position by position, each given the same tokens before it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.support.smollm2 import Case, Scores
from tokenmill_server.llm_outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Comparison:
    """All [num_positions]. `agrees`: our most likely token is the reference's; `margins`: distance of the reference's
    two largest logits; `differences`: of log-probabilities of the token that is there, absolute."""

    agrees: torch.Tensor
    margins: torch.Tensor
    differences: torch.Tensor

    def agreement(self, min_margin: float = 0.0) -> float:
        """Share of positions that agree, of those where the reference's choice is clear by more than this."""
        return self.agrees[self.margins >= min_margin].double().mean().item()

    def describe(self, min_margin: float) -> str:
        """The figures in one line."""
        share = (self.margins >= min_margin).double().mean().item()
        return (
            f"{len(self.agrees)} positions: top-1 agreement {self.agreement():.2%}, {self.agreement(min_margin):.2%} "
            f"of the {share:.1%} with a margin of {min_margin}; log-probabilities differ by "
            f"{self.differences.mean().item():.5f} on average, {self.differences.max().item():.4f} at most"
        )


def compare_generated(
    cases: Sequence[Case], outputs: Sequence[RequestOutput], score: Callable[[list[int]], Scores]
) -> Comparison:
    """Greedy outputs with log-probabilities: each generated token is our choice at its position."""
    agrees, margins, differences = [], [], []
    for case, output in zip(cases, outputs, strict=True):
        ids, rows = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert rows is not None
        first = len(case.prompt_ids) - 1
        expected = score(case.prompt_ids + ids)
        ours = torch.tensor([row[token_id].logprob for token_id, row in zip(ids, rows, strict=True)])
        agrees.append(expected.best[first:] == torch.tensor(ids))
        margins.append(expected.margins[first:])
        differences.append((ours - expected.logprobs[first:]).abs())
    return Comparison(torch.cat(agrees), torch.cat(margins), torch.cat(differences))


def compare_given(
    cases: Sequence[Case], outputs: Sequence[RequestOutput], score: Callable[[list[int]], Scores]
) -> Comparison:
    """Outputs whose prompt was `all_ids` of the cases, with one or more log-probabilities per prompt token."""
    agrees, margins, differences = [], [], []
    for case, output in zip(cases, outputs, strict=True):
        rows = output.prompt_logprobs
        assert rows is not None
        assert rows[0] is None
        expected = score(case.all_ids)
        ours: list[float] = []
        for token_id, best, row in zip(case.all_ids[1:], expected.best.tolist(), rows[1:], strict=True):
            assert row is not None
            ours.append(row[token_id].logprob)
            agrees.append(best in row and row[best].rank == 1)
        margins.append(expected.margins)
        differences.append((torch.tensor(ours) - expected.logprobs).abs())
    return Comparison(torch.tensor(agrees), torch.cat(margins), torch.cat(differences))


def compare_scores(ours: Sequence[Scores], reference: Sequence[Scores]) -> Comparison:
    """Two sets of scores of the same sequences."""
    return Comparison(
        torch.cat([first.best == second.best for first, second in zip(ours, reference, strict=True)]),
        torch.cat([scores.margins for scores in reference]),
        torch.cat([(first.logprobs - second.logprobs).abs() for first, second in zip(ours, reference, strict=True)]),
    )
