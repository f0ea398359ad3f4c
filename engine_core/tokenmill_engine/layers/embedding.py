"""Token ids to vectors at the bottom of the model, vectors to logits at its top."""

from collections.abc import Iterator

import torch

from tokenmill_engine.layers.linear import Placement
from tokenmill_kernels import ops


class TokenEmbedding:
    """One row per vocabulary entry."""

    __slots__ = ("weight",)

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        self.weight: torch.Tensor | ops.PackedWeight = placement.empty(vocab_size, hidden_size)

    def targets(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """(checkpoint name, view to fill). Valid until `finalize`."""
        if isinstance(self.weight, ops.PackedWeight):
            raise RuntimeError("the weight was packed: its rows are gone")
        yield f"{name}.weight", self.weight

    def finalize(self) -> None:
        """Packs the loaded weight: packed rows can be looked up as well, and a tied head shares them."""
        if isinstance(self.weight, torch.Tensor):
            self.weight = ops.pack_linear(self.weight)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int32 [num_tokens] -> [num_tokens, hidden_size]."""
        return ops.embedding(input_ids, self.weight)


class LMHead:
    """Scores of every vocabulary entry, by rows of its own or by those of the token embedding it is tied to."""

    __slots__ = ("_rows",)

    def __init__(self, rows: TokenEmbedding) -> None:
        self._rows = rows

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> float32 [num_rows, vocab_size]."""
        return ops.linear(hidden, self._rows.weight, out_dtype=torch.float32)

    def argmax(self, hidden: torch.Tensor) -> torch.Tensor:
        """Most likely entry of each row, int32 [num_rows]; -1 where the scores are not numbers."""
        return ops.linear_argmax(hidden, self._rows.weight)
