"""Token ids to vectors at the bottom of the model, vectors to logits at its top.

Several workers that share a model have the vocabulary between them, in runs of entries: the results are whole on every
one of them.
"""

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from tokenmill_engine.layers.placement import Placement, Target, whole
from tokenmill_kernels import ops


class TokenEmbedding:
    """One row per vocabulary entry."""

    __slots__ = ("entries", "group", "is_whole", "longest_run", "weight")

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self.group = placement.group
        self.entries = placement.run(vocab_size)
        """Those whose rows are here."""
        self.is_whole = self.entries.is_whole
        self.longest_run = placement.longest_run(vocab_size)
        """Entries of any worker but the last."""
        self.weight: torch.Tensor | ops.PackedWeight = placement.empty(self.entries.count, hidden_size)

    def targets(self, name: str) -> Iterator[tuple[str, Target]]:
        """(checkpoint name, place). Valid until `finalize`."""
        if isinstance(self.weight, ops.PackedWeight):
            raise RuntimeError("the weight was packed: its rows are gone")
        yield f"{name}.weight", Target(self.weight, (self.entries, whole(self.weight.shape[1])))

    def finalize(self) -> None:
        """Packs the loaded weight: packed rows can be looked up as well, and a tied head shares them."""
        if isinstance(self.weight, torch.Tensor):
            self.weight = ops.pack_linear(self.weight)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int32 [num_tokens] -> [num_tokens, hidden_size]."""
        if self.is_whole:
            return ops.embedding(input_ids, self.weight)
        rows = input_ids - self.entries.first
        is_elsewhere = (rows < 0) | (rows >= self.entries.count)
        found = ops.embedding(rows.clamp(0, self.entries.count - 1), self.weight)
        return self.group.all_reduce(found.masked_fill(is_elsewhere[:, None], 0))


class LMHead:
    """Scores of every vocabulary entry, by rows of its own or by those of the token embedding it is tied to."""

    __slots__ = ("_rows",)

    def __init__(self, rows: TokenEmbedding) -> None:
        self._rows = rows

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size]."""
        logits = ops.linear(hidden, self._rows.weight, out_dtype=torch.float32)
        return logits if self._rows.is_whole else self._gather(logits)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Most likely entry of each row, int32 [num_rows]; -1 where the scores are not numbers."""
        best = ops.linear_argmax(hidden, self._rows.weight)
        return best if self._rows.is_whole else self._best_of_all(hidden, best)

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all entries from those of each worker's own."""
        rows = self._rows
        missing = rows.longest_run - rows.entries.count
        gathered = rows.group.all_gather(F.pad(logits, (0, missing)) if missing else logits)
        vocab_size = rows.entries.total
        # The sampler's operators take rows without gaps.
        return gathered if gathered.shape[1] == vocab_size else gathered[:, :vocab_size].contiguous()

    def _best_of_all(self, hidden: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """The winner among the workers' own, `best` int32 [num_rows]: -1 if that is what one of them has.

        Only winners and their scores are sent, not logits. Both go as float32, which counts far enough for any
        vocabulary. Of equal scores the first worker's wins, and so the lowest index as within one worker.
        """
        group, first = self._rows.group, self._rows.entries.first
        winners = ops.embedding(best.clamp(min=0), self._rows.weight)
        scores = (hidden.float() * winners.float()).sum(dim=-1)
        token_ids = torch.where(best < 0, best, best + first)
        all_best = group.all_gather(torch.stack((scores, token_ids.float()), dim=-1)).view(-1, group.size, 2)
        scores, token_ids = all_best.unbind(dim=-1)
        winner = token_ids.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
        return winner.masked_fill((token_ids < 0).any(dim=1), -1).to(torch.int32)
