"""Repetition, frequency and presence penalties, counted afresh from the token table at each step.

Nothing is kept between steps, so a preempted or chunked request cannot lose or double a count.
"""

import torch

from tokenmill_engine.sampling.tokens import Rows, TokenTable
from tokenmill_kernels.sampling_columns import FREQUENCY, PRESENCE, REPETITION

_PIECE_ELEMENTS = 1 << 22
"""Bound on the elements of a temporary tensor."""


def apply_penalties(
    logits: torch.Tensor, rows: Rows, table_floats: torch.Tensor, tokens: TokenTable, max_tokens: int
) -> None:
    """Change `rows` of `logits` [num_rows, vocab_size] (float32, contiguous) in place.

    repetition_penalty r: a token of the prompt or the output has a positive logit divided, a negative one multiplied
    by r (CTRL, arXiv:1909.05858). Then, for a token that occurs c > 0 times in the output,
    logit - c * frequency_penalty - presence_penalty (OpenAI API reference).

    `table_floats` is `SamplingTable.floats`; no row has more than `max_tokens` known tokens.
    """
    for part in rows.pieces(max(1, _PIECE_ELEMENTS // max(max_tokens, logits.shape[1]))):
        _apply(logits, part, table_floats[part.slots], tokens, max_tokens)


def _apply(logits: torch.Tensor, rows: Rows, floats: torch.Tensor, tokens: TokenTable, max_tokens: int) -> None:
    vocab_size = logits.shape[1]
    position = torch.arange(max_tokens, device=logits.device)[None]
    num_tokens = tokens.num_tokens[rows.slots][:, None]
    ids = tokens.token_ids[rows.slots, :max_tokens].to(torch.int64)
    # Positions past the end repeat the first token.
    ids = torch.where(position < num_tokens, ids, ids[:, :1])
    in_output = (position >= tokens.num_prompt[rows.slots][:, None]) & (position < num_tokens)
    counts = torch.zeros(len(rows), vocab_size, dtype=torch.float32, device=logits.device)
    count = counts.scatter_add_(1, ids, in_output.to(torch.float32)).gather(1, ids)

    flat = logits.view(-1)
    index = rows.index[:, None] * vocab_size + ids
    value = flat[index]
    value = torch.where(value > 0, value / floats[:, REPETITION, None], value * floats[:, REPETITION, None])
    value -= count * floats[:, FREQUENCY, None]
    value -= (count > 0) * floats[:, PRESENCE, None]
    # A repeated token writes the same value again.
    flat.index_copy_(0, index.view(-1), value.view(-1))
