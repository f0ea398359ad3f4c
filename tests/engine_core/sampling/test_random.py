"""The uniform numbers: equal to the written-down hash, and random enough."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine_core.sampling import reference
from tokenmill_engine.sampling.random import as_int64, uniform


@given(st.lists(st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20))
def test_matches_the_integer_hash(pairs: list[tuple[int, int]]) -> None:
    seeds = torch.tensor([as_int64(seed) for seed, _ in pairs])
    positions = torch.tensor([position for _, position in pairs])
    expected = [reference.uniform(seed & (2**64 - 1), position) for seed, position in pairs]
    assert uniform(seeds, positions).tolist() == expected


def test_is_uniform_over_positions_and_over_seeds() -> None:
    n = 100_000
    index = torch.arange(n)
    zero = torch.zeros(n, dtype=torch.int64)
    for u in (uniform(zero, index), uniform(index, zero)):
        counts = torch.histc(u, bins=100, min=0.0, max=1.0)
        chi_square = ((counts - n / 100) ** 2 / (n / 100)).sum().item()
        assert chi_square < 160  # 99 degrees of freedom: p < 1e-4 beyond


def test_neighbouring_seeds_and_positions_are_unrelated() -> None:
    seeds = torch.arange(300)[:, None].expand(300, 300).reshape(-1)
    positions = torch.arange(300)[None, :].expand(300, 300).reshape(-1)
    grid = uniform(seeds, positions).view(300, 300) - 0.5
    limit = 5 / (12 * 300)  # five standard deviations of the mean product of independent rows
    for other in (grid.roll(1, 0), grid.roll(1, 1), grid.roll((1, 1), (0, 1)), grid.roll((-1, 1), (0, 1))):
        assert abs((grid * other).mean().item()) < limit
    assert len(set(grid.flatten().tolist())) == grid.numel()
