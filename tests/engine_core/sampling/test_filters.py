"""The kept set and the drawn token against the row-by-row reference."""

import pytest
import torch

from tests.engine_core.sampling import reference
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling.filters import FilterParams, draw, draw_filtered


def columns(params: SamplingParams, vocab_size: int, num_rows: int) -> FilterParams:
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    return FilterParams(
        top_k=torch.full((num_rows, 1), top_k),
        top_p=torch.full((num_rows, 1), params.top_p),
        min_p=torch.full((num_rows, 1), params.min_p),
    )


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 128, 129, 256, 257, 1000, 5003])
@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0])
def test_draw_is_the_inverse_distribution_function(vocab_size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    weights = (torch.randn(50, vocab_size, generator=generator) * scale).softmax(1)
    weights[torch.rand(50, vocab_size, generator=generator) < 0.3] = 0.0
    weights[:, vocab_size // 2] = 0.1
    u = torch.rand(50, dtype=torch.float64, generator=generator)
    u[0], u[1] = 0.0, 1.0 - 2.0**-53
    for row, token in enumerate(draw(weights, u).tolist()):
        p = weights[row].double().numpy()
        assert p[token] > 0
        reference.expect_token(token, p / p.sum(), u[row].item())


@pytest.mark.parametrize("filters", reference.FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 128, 700, 3001])
@pytest.mark.parametrize("ties", [False, True])
def test_filtered_draw_matches_the_reference(vocab_size: int, ties: bool, filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(1)
    num_rows = 60
    # Peaked and flat rows, so that both ways (few candidates, whole vocabulary) are taken.
    scale = torch.linspace(0.1, 6.0, num_rows)[:, None]
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    if ties:
        logits = (logits * 2).round() / 2
    u = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    params = SamplingParams(**filters)
    tokens = draw_filtered(logits.softmax(1), u, columns(params, vocab_size, num_rows), small_top_k=False)
    for row in range(num_rows):
        p = reference.distribution(logits[row].double().numpy(), params)
        reference.expect_token(int(tokens[row]), p, u[row].item())


@pytest.mark.parametrize("filters", reference.FILTERS, ids=str)
def test_both_ways_agree(filters: dict[str, float]) -> None:
    vocab_size, num_rows = 700, 200
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    u = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    params = columns(SamplingParams(**filters), vocab_size, num_rows)
    weights = logits.softmax(1)
    candidates_first = draw_filtered(weights, u, params, small_top_k=False)
    # Every row alone, and with a row beside it that needs the whole vocabulary.
    flat = torch.full((1, vocab_size), 1 / vocab_size)
    for row in range(0, num_rows, 10):
        pair = columns(SamplingParams(**filters), vocab_size, 2)
        two = draw_filtered(torch.cat((weights[row : row + 1], flat)), u[row].repeat(2), pair, small_top_k=False)
        assert two[0] == candidates_first[row]


def test_ties_with_the_last_kept_token_are_kept() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0]).expand(1000, -1).contiguous()
    u = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    params = columns(SamplingParams(top_k=2), 5, 1000)
    tokens = draw_filtered(logits.softmax(1), u, params, small_top_k=False)
    assert set(tokens.tolist()) == {1, 2, 3, 4}


def test_ties_beyond_the_candidates_are_kept() -> None:
    logits = torch.zeros(1, 1000)
    u = torch.tensor([0.9999], dtype=torch.float64)
    params = columns(SamplingParams(top_k=10), 1000, 1)
    assert draw_filtered(logits.softmax(1), u, params, small_top_k=False).item() == 999


def test_rows_with_few_possible_tokens_need_no_more_candidates() -> None:
    logits = torch.full((300, 1000), float("-inf"))
    logits[:, 100:103] = 0.0
    u = torch.rand(300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for filters in reference.FILTERS:
        params = columns(SamplingParams(**filters), 1000, 300)
        tokens = draw_filtered(logits.softmax(1), u, params, small_top_k=params.top_k[0].item() <= 64)
        assert set(tokens.tolist()) == {100, 101, 102}, filters
