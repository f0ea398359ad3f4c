"""From weights to one token: top-k, top-p and min-p, then the inverse of the cumulative distribution.

The token is the first, in vocabulary order, at which the running sum of the kept weights exceeds `u` times their
total. So it depends on the row's own weights and uniform number, not on the batch around it.

Order of the filters: min_p and top_k on the distribution after temperature, then top_p on what they leave,
renormalized. Tokens that tie with the last one kept are kept too.
"""

from dataclasses import dataclass

import torch

_CHUNK = 256
"""Tokens summed before the search looks into single ones."""
_NUM_CANDIDATES = 128
"""Most likely tokens that are looked at before the whole vocabulary is sorted."""


@dataclass(slots=True)
class FilterParams:
    """Columns of one number per row, [n, 1]."""

    top_k: torch.Tensor
    """int64; the vocabulary size keeps all."""
    top_p: torch.Tensor
    """float32; 1 keeps all."""
    min_p: torch.Tensor
    """float32; 0 keeps all."""

    def rows(self, index: torch.Tensor) -> "FilterParams":
        return FilterParams(self.top_k[index], self.top_p[index], self.min_p[index])


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Token of each row by inverse cumulative distribution.

    Args:
        weights: float32 [n, vocab_size], not negative, contiguous; need not sum to 1.
        u: float64 [n] in [0, 1).
    Returns:
        int64 [n]; meaningless (but in range) for rows whose weights are not numbers or all zero.
    """
    num_rows, vocab_size = weights.shape
    if vocab_size % _CHUNK:
        weights = torch.nn.functional.pad(weights, (0, _CHUNK - vocab_size % _CHUNK))
    chunks = weights.view(num_rows, -1, _CHUNK)
    chunk_ends = chunks.sum(2).cumsum(1, dtype=torch.float64)
    target = u[:, None] * chunk_ends[:, -1:]
    chunk = _first_above(chunk_ends, target)
    before = torch.where(chunk > 0, chunk_ends.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, _CHUNK)).squeeze(1)
    token = chunk * _CHUNK + _first_above(inside.cumsum(1, dtype=torch.float64), target - before)
    return token.squeeze(1).clamp_(max=vocab_size - 1)


def draw_filtered(weights: torch.Tensor, u: torch.Tensor, params: FilterParams, *, small_top_k: bool) -> torch.Tensor:
    """As `draw`, from the tokens that the filters leave. `weights` must sum to 1.

    `small_top_k` says that every row's top_k is at most `MAX_SMALL_TOP_K`, so that the most likely candidates
    suffice. Elsewhere they are tried first, and the rows that need more are sorted.
    """
    if weights.shape[1] <= _NUM_CANDIDATES:
        return draw_above_threshold(weights, u, params)
    token, covered = _draw_from_candidates(weights, u, params)
    if small_top_k or bool(covered.all()):
        return token
    rest = (~covered).nonzero().squeeze(1)
    token[rest] = draw_above_threshold(weights[rest], u[rest], params.rows(rest))
    return token


def num_kept(descending: torch.Tensor, params: FilterParams, *, complete: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of the most likely tokens the filters keep.

    Args:
        descending: float32 [n, m] largest weights of each row, of a sum of 1.
        complete: whether they are all of the vocabulary.
    Returns:
        int64 [n, 1] number kept, at least 1, and bool [n, 1] whether `descending` was enough to know it.
    """
    width = descending.shape[1]
    ends = descending.cumsum(1, dtype=torch.float64)
    above_min_p = (descending >= params.min_p * descending[:, :1]).count_nonzero(1)[:, None]
    kept = torch.minimum(above_min_p, params.top_k).clamp_(min=1)
    cut_off_rest = (params.top_k <= width) | (above_min_p < width) | (descending[:, -1:] == 0)
    if complete:
        cut_off_rest = torch.ones_like(cut_off_rest)
    kept = _with_ties(descending, kept.clamp(max=width))
    # The mass that top_p is a share of. Where min_p and top_k cut nothing it is the whole.
    total = torch.where(cut_off_rest, ends.gather(1, kept - 1), 1.0)
    # A token stays while those before it fall short of the share.
    in_top_p = torch.searchsorted(ends, params.top_p * total) + 1
    kept = torch.where(params.top_p < 1.0, torch.minimum(kept, in_top_p), kept)
    whole = (params.min_p <= 0) & (params.top_k > width)
    return kept.clamp_(max=width), cut_off_rest | (whole & (in_top_p <= width))


def _with_ties(descending: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """`kept` [n, 1] and the tokens that tie with the last of them; at least 1, also for rows that are not numbers."""
    return (descending >= descending.gather(1, kept - 1)).count_nonzero(1)[:, None].clamp_(min=1)


def _draw_from_candidates(
    weights: torch.Tensor, u: torch.Tensor, params: FilterParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [n] tokens, and bool [n] whether the candidates held every kept token."""
    descending, ids = weights.topk(_NUM_CANDIDATES, dim=1)
    kept, known = num_kept(descending, params, complete=False)
    threshold = descending.gather(1, kept - 1)
    ids, order = torch.where(descending >= threshold, ids, weights.shape[1]).sort(1)
    ends = torch.where(ids < weights.shape[1], descending.gather(1, order), 0.0).cumsum(1, dtype=torch.float64)
    token = ids.gather(1, _first_above(ends, u[:, None] * ends[:, -1:]))
    last = descending[:, -1:]
    covered = known & ((last < threshold) | (last == 0))
    return token.squeeze(1).clamp_(max=weights.shape[1] - 1), covered.squeeze(1)


def draw_above_threshold(weights: torch.Tensor, u: torch.Tensor, params: FilterParams) -> torch.Tensor:
    """As `draw_filtered`, by a sort of the whole vocabulary."""
    descending = _sorted_descending(weights)
    kept, _ = num_kept(descending, params, complete=True)
    threshold = descending.gather(1, kept - 1)
    return draw(torch.where(weights >= threshold, weights, 0.0), u)


def _sorted_descending(weights: torch.Tensor) -> torch.Tensor:
    if weights.device.type == "cpu":
        # NumPy's vectorized sort is some thirty times as fast as torch's here.
        ascending = torch.from_numpy(weights.numpy().copy())
        ascending.numpy().sort(axis=1)
        return ascending.flip(1)
    return weights.sort(dim=1, descending=True).values


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: first column of the running sums `ends` [n, m] that exceeds `target` [n, 1].

    The target is kept under the last sum, so a token of weight 0 is never found: where a sum first exceeds a number,
    it has just grown.
    """
    target = torch.minimum(target.clamp(min=0.0), torch.nextafter(ends[:, -1:], torch.zeros_like(target)))
    return torch.searchsorted(ends, target, right=True).clamp_(max=ends.shape[1] - 1)
