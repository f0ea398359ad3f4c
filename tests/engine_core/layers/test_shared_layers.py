"""Layers that several workers have between them against whole ones, with numbers where a part is easily wrong."""

from collections.abc import Iterable

import pytest
import torch
from torch.nn import functional as F

from tests.support.thread_group import ThreadGroup, on_every_rank, thread_groups
from tokenmill_engine.layers.embedding import LMHead, TokenEmbedding
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.norm import RMSNorm
from tokenmill_engine.layers.placement import Placement, Target, cut, whole

CPU = torch.device("cpu")
SIZES = [2, 3, 4]
VOCAB, HIDDEN = 50, 16
NAN, INFINITY = float("nan"), float("inf")


def fill(targets: Iterable[tuple[str, Target]], values: dict[str, torch.Tensor]) -> None:
    """Each place gets its part of the whole tensor."""
    for name, target in targets:
        assert target.shape == values[name].shape
        target.view.copy_(cut(values[name], target.part))


def table_of(group: ThreadGroup, weight: torch.Tensor, packed: bool = True) -> TokenEmbedding:
    table = TokenEmbedding(VOCAB, HIDDEN, Placement(torch.float32, CPU, group))
    fill(table.targets("t"), {"t.weight": weight})
    if packed:
        table.finalize()
    return table


def rows_of(group: ThreadGroup, weight: torch.Tensor, ids: torch.Tensor, packed: bool = True) -> torch.Tensor:
    return group.all_reduce(table_of(group, weight, packed)(ids))


def random_weight() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_products_of_parts_of_the_columns_add_up(size: int, has_bias: bool) -> None:
    values = {"down.weight": torch.randn(10, 24), "down.bias": torch.randn(10)}
    x = torch.randn(7, 24)

    def run(group: ThreadGroup) -> torch.Tensor:
        placement = Placement(torch.float32, CPU, group)
        columns = placement.share(24)
        linear = Linear(columns, {"down": whole(10)}, has_bias, placement)
        fill(linear.targets(""), values)
        linear.finalize()
        return group.all_reduce(linear(cut(x, (whole(7), columns)).contiguous()))

    expected = F.linear(x, values["down.weight"], values["down.bias"] if has_bias else None)
    for result in on_every_rank(thread_groups(size), run):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_found_wherever_they_are(size: int) -> None:
    weight, every_id = random_weight(), torch.arange(VOCAB, dtype=torch.int32)
    for rows in on_every_rank(thread_groups(size), lambda group: rows_of(group, weight, every_id)):
        assert torch.equal(rows, weight)


@pytest.mark.parametrize("packed", [True, False])
def test_a_row_of_other_numbers_spoils_nobody_elses(packed: bool) -> None:
    """A worker that looks a row up in vain must not add what it finds instead: its first or last row."""
    weight = random_weight()
    weight[[0, 24, 25, 49]] = torch.tensor([NAN, INFINITY, NAN, -INFINITY])[:, None]
    ids = torch.tensor([1, 23, 26, 48, 0, 24, 25, 49], dtype=torch.int32)
    for rows in on_every_rank(thread_groups(2), lambda group: rows_of(group, weight, ids, packed)):
        torch.testing.assert_close(rows, weight[ids], equal_nan=True, atol=0, rtol=0)


def test_the_first_norm_looks_rows_up_among_workers() -> None:
    weight, scale = random_weight(), torch.randn(HIDDEN)
    ids = torch.tensor([3, 40, 3], dtype=torch.int32)

    def run(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        norm = RMSNorm(HIDDEN, 1e-5, Placement(torch.float32, CPU, group))
        fill(norm.targets("norm"), {"norm.weight": scale})
        return norm.embed(ids, table_of(group, weight))

    for normed, stream in on_every_rank(thread_groups(3), run):
        assert torch.equal(stream, weight[ids])
        torch.testing.assert_close(normed, F.rms_norm(weight[ids], (HIDDEN,), scale, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_norm_adds_up_what_is_in_front_of_it(size: int) -> None:
    """The residual, which all workers have, once."""
    parts, residual, scale = torch.randn(size, 5, HIDDEN), torch.randn(5, HIDDEN), torch.randn(HIDDEN)

    def run(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        norm = RMSNorm(HIDDEN, 1e-5, Placement(torch.float32, CPU, group))
        fill(norm.targets("norm"), {"norm.weight": scale})
        return norm(parts[group.rank].clone(), residual.clone())

    total = parts.sum(dim=0) + residual
    for normed, stream in on_every_rank(thread_groups(size), run):
        torch.testing.assert_close(stream, total, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(normed, F.rms_norm(total, (HIDDEN,), scale, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_the_whole_head(size: int, packed: bool) -> None:
    weight, hidden = random_weight(), torch.randn(9, HIDDEN)
    expected = hidden @ weight.T
    for logits in on_every_rank(thread_groups(size), lambda group: LMHead(table_of(group, weight, packed))(hidden)):
        assert logits.shape == (9, VOCAB)
        assert logits.is_contiguous()
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def best(weight: torch.Tensor, hidden: torch.Tensor, size: int) -> list[int]:
    """The tokens that all workers choose."""
    every = on_every_rank(thread_groups(size), lambda group: LMHead(table_of(group, weight)).argmax(hidden))
    assert all(chosen.dtype == torch.int32 and torch.equal(chosen, every[0]) for chosen in every)
    return every[0].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_every_entry_can_win(size: int) -> None:
    weight = F.normalize(random_weight(), dim=-1)
    assert best(weight, weight, size) == list(range(VOCAB))


@pytest.mark.parametrize("size", SIZES)
def test_scores_that_are_all_negative_are_no_match_for_missing_entries(size: int) -> None:
    weight, hidden = -random_weight().abs(), torch.ones(1, HIDDEN)
    chosen = int((hidden @ weight.T).argmax())
    assert best(weight, hidden, size) == [chosen]
    everything = on_every_rank(thread_groups(size), lambda group: LMHead(table_of(group, weight))(hidden))
    assert all(int(logits.argmax()) == chosen for logits in everything)


@pytest.mark.parametrize("size", SIZES)
def test_of_equal_scores_the_lowest_index_wins(size: int) -> None:
    weight = random_weight()
    weight[7] = weight[31] = weight[49] = 3 * torch.ones(HIDDEN)
    assert best(weight, torch.ones(1, HIDDEN), size) == [7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("poisoned", [0, 20, 49])
def test_a_row_with_a_score_that_is_no_number_has_no_winner(size: int, poisoned: int) -> None:
    """Wherever the bad entry is, and whatever the workers without it found."""
    weight = random_weight()
    weight[poisoned, 3] = NAN
    assert best(weight, torch.randn(5, HIDDEN), size) == [-1] * 5


@pytest.mark.parametrize("size", SIZES)
def test_hidden_states_that_are_no_numbers_have_no_winner_and_the_others_do(size: int) -> None:
    weight, hidden = random_weight(), torch.randn(4, HIDDEN)
    expected = (hidden @ weight.T).argmax(dim=-1).tolist()
    hidden[1, 5] = NAN
    assert best(weight, hidden, size) == [expected[0], -1, *expected[2:]]


def test_no_rows_have_no_winners() -> None:
    assert best(random_weight(), torch.empty(0, HIDDEN), 2) == []
