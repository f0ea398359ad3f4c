"""Token ids to vectors at the bottom of the model, vectors to logits at its top.

Several workers that share a model have the vocabulary between them, in runs of entries. Logits are whole on every one
of them; of the vectors each has a part, and the norm behind adds these up.
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
        """int32 [num_tokens] -> [num_tokens, hidden_size]; of several workers a part of that sum from each: the rows
        that it has, and zeros."""
        if self.is_whole:
            return ops.embedding(input_ids, self.weight)
        return ops.embedding_part(input_ids, self.weight, self.entries.first)


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
        rows = self._rows
        if rows.is_whole:
            return ops.linear_argmax(hidden, rows.weight)
        # Only winners and their scores are sent, not logits.
        pairs = rows.group.all_gather(ops.linear_best(hidden, rows.weight, rows.entries.first))
        return ops.pick_best(pairs.view(len(pairs), rows.group.size, 2))

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of all entries from those of each worker's own."""
        rows = self._rows
        missing = rows.longest_run - rows.entries.count
        gathered = rows.group.all_gather(F.pad(logits, (0, missing)) if missing else logits)
        vocab_size = rows.entries.total
        # The sampler's operators take rows without gaps.
        return gathered if gathered.shape[1] == vocab_size else gathered[:, :vocab_size].contiguous()
