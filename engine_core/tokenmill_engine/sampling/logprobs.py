"""Log-probabilities of the raw logits: before temperature, penalties and masks."""

from dataclasses import dataclass

import torch

from tokenmill_kernels.cpu import sampling as native


@dataclass(slots=True)
class Logprobs:
    """Of n positions, on the device. Column 0 is the position's own token, the others the k most likely."""

    token_ids: torch.Tensor
    """int32 [n, 1 + k]"""
    logprobs: torch.Tensor
    """float32 [n, 1 + k]"""
    ranks: torch.Tensor
    """int32 [n]: 1 plus the number of more likely tokens."""


@dataclass(slots=True)
class RawScores:
    """What is kept of raw logits until their token is chosen."""

    logits: torch.Tensor
    """float32 [n, vocab_size]"""

    def score(self, token_ids: torch.Tensor, num_top: int) -> Logprobs:
        """Log-probabilities of `token_ids` (int64 [n]) beside the `num_top` most likely tokens."""
        if self.logits.is_cuda:
            # Machines without a GPU never load its kernels.
            from tokenmill_kernels.gpu import sampling_scores

            return Logprobs(*sampling_scores.score(self.logits, token_ids, num_top))
        if native.is_available():
            return Logprobs(*native.score(self.logits, token_ids, num_top))
        log_total = torch.logsumexp(self.logits, dim=1, keepdim=True)
        own_ids = token_ids[:, None]
        own = self.logits.gather(1, own_ids)
        ranks = (self.logits > own).sum(1, dtype=torch.int32) + 1
        if num_top:
            top, top_ids = self.logits.topk(num_top, dim=1)
            own = torch.cat((own, top), dim=1)
            own_ids = torch.cat((own_ids, top_ids), dim=1)
        return Logprobs(own_ids.to(torch.int32), own - log_total, ranks)
