"""The library's draw against the row-by-row reference."""

import pytest
import torch

from tests.engine_core.sampling import reference
from tokenmill_engine.messages import SamplingParams
from tokenmill_kernels.cpu import library
from tokenmill_kernels.cpu.sampling import DrawParams, draw, mask, score


def draw_params(params: SamplingParams, vocab_size: int, u: torch.Tensor) -> DrawParams:
    n = len(u)
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    return DrawParams(
        temperature=torch.full((n,), params.temperature),
        top_k=torch.full((n,), top_k),
        top_p=torch.full((n,), params.top_p),
        min_p=torch.full((n,), params.min_p),
        u=u,
    )


@pytest.mark.parametrize("filters", [{}, *reference.FILTERS], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 128, 255, 257, 700, 3001])
@pytest.mark.parametrize("ties", [False, True])
def test_tokens_match_the_reference(vocab_size: int, ties: bool, filters: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 40
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.linspace(0.1, 6.0, num_rows)[:, None]
    if ties:
        logits = (logits * 2).round() / 2
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = float("-inf")
    logits[:, vocab_size // 3] = 0.0
    u = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    u[:2] = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    params = SamplingParams(temperature=0.7, **filters)
    rows = torch.randperm(num_rows, generator=generator)
    tokens = draw(logits, rows, draw_params(params, vocab_size, u))
    for token, row, number in zip(tokens.tolist(), rows.tolist(), u.tolist(), strict=True):
        reference.expect_token(token, reference.distribution(logits[row].double().numpy(), params), number)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_rows_do_not_depend_on_threads_and_neighbours(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 1000, generator=generator)
    u = torch.rand(50, dtype=torch.float64, generator=generator)
    params = draw_params(SamplingParams(top_p=0.9, top_k=400), 1000, u)
    library.set_num_threads(1)
    expected = [
        draw(
            logits, torch.tensor([row]), draw_params(SamplingParams(top_p=0.9, top_k=400), 1000, u[row : row + 1])
        ).item()
        for row in range(50)
    ]
    library.set_num_threads(num_threads)
    assert draw(logits, torch.arange(50), params).tolist() == expected


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_rows_that_are_no_distribution_are_marked(filters: dict[str, float]) -> None:
    logits = torch.zeros(5, 300)
    logits[0, 299] = float("nan")
    logits[1, 7] = float("inf")
    logits[2] = float("-inf")
    logits[3, :299] = float("-inf")
    u = torch.full((5,), 0.3, dtype=torch.float64)
    tokens = draw(logits, torch.arange(5), draw_params(SamplingParams(**filters), 300, u)).tolist()
    assert tokens[:4] == [-1, -1, -1, 299]
    assert tokens[4] >= 0


def test_rows_of_a_wider_matrix_and_extreme_temperatures() -> None:
    wide = torch.randn(4, 600, generator=torch.Generator().manual_seed(1))
    logits = wide[:, :500]
    u = torch.full((4,), 0.999, dtype=torch.float64)
    cold = draw(logits, torch.arange(4), draw_params(SamplingParams(temperature=1e-5), 500, u))
    assert cold.tolist() == logits.argmax(1).tolist()
    hot = draw(logits, torch.arange(4), draw_params(SamplingParams(temperature=1e6), 500, u))
    assert all(abs(token - 499) <= 1 for token in hot.tolist())


@pytest.mark.parametrize(
    ("vocab_size", "num_top"), [(1, 0), (1, 1), (5, 5), (300, 2), (300, 3), (3000, 20), (700, 700)]
)
@pytest.mark.parametrize("ties", [False, True])
def test_scores_match_a_log_softmax(vocab_size: int, num_top: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(20, vocab_size, generator=generator) * torch.linspace(0.1, 90, 20)[:, None]
    if ties:
        logits = logits.round()
    own = torch.randint(vocab_size, (20,), generator=generator)
    token_ids, logprobs, ranks = score(logits, own, num_top)
    expected = logits.double().log_softmax(1)
    for row in range(20):
        order = sorted(range(vocab_size), key=lambda token, row=row: (-logits[row, token].item(), token))
        assert token_ids[row].tolist() == [own[row].item(), *order[:num_top]]
        torch.testing.assert_close(logprobs[row].double(), expected[row][token_ids[row].long()], atol=1e-5, rtol=1e-6)
        assert ranks[row] == 1 + (logits[row] > logits[row, own[row]]).sum()


def test_scores_of_a_row_without_numbers_are_none_and_harm_no_other() -> None:
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0))
    own = torch.tensor([1, 2, 3, 4])
    clean = score(logits, own, 5)
    logits[1, 500] = float("nan")
    logits[2] = float("nan")
    dirty = score(logits, own, 5)
    assert dirty[1][1:3].isnan().all()
    for before, after in zip(clean, dirty, strict=True):
        assert before[[0, 3]].equal(after[[0, 3]])
    assert ((dirty[0] >= 0) & (dirty[0] < 1000)).all()


def test_other_types_are_refused() -> None:
    u = torch.zeros(1, dtype=torch.float64)
    with pytest.raises(TypeError, match="float32"):
        draw(torch.zeros(1, 8, dtype=torch.bfloat16), torch.arange(1), draw_params(SamplingParams(), 8, u))
    with pytest.raises(TypeError, match="float32"):
        score(torch.zeros(1, 8, dtype=torch.bfloat16), torch.arange(1), 1)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 700, 3001])
def test_only_what_the_bits_allow_is_left(vocab_size: int, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(9, vocab_size + 5, generator=generator)[:, :vocab_size]
    rows = torch.tensor([7, 0, 3, 4], dtype=torch.int32)
    allowed = torch.rand(4, vocab_size, generator=generator) < torch.tensor([0.5, 0.01, 0.99, 2.0])[:, None]
    padded = torch.nn.functional.pad(allowed, (0, -vocab_size % 32)).view(4, -1, 32)
    bits = (padded.long() << torch.arange(32)).sum(2).to(torch.int32)
    expected = logits.clone()
    for index, row in enumerate(rows.tolist()):
        expected[row, ~allowed[index]] = float("-inf")
    library.set_num_threads(num_threads)
    mask(logits, rows, bits)
    assert torch.equal(logits, expected)
