"""The sampling kernels in the interpreter, against the row-by-row reference."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.engine_core.sampling import reference
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling.random import as_int64
from tokenmill_kernels import sampling_columns as columns
from tokenmill_kernels.gpu import sampling_search as search
from tokenmill_kernels.gpu.sampling import SamplingTables, Workspace, choose_tokens
from tokenmill_kernels.gpu.sampling_math import uniform

CPU = torch.device("cpu")
NUM_PROMPT, NUM_OUTPUT = 3, 4
COMBINED = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    *reference.FILTERS,
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9},
    {"temperature": 0.6, "top_k": 7, "min_p": 0.2},
]


def make_tables(params: Sequence[dict[str, float]], vocab_size: int) -> SamplingTables:
    """Slot i has `params[i]` and the seed i."""
    floats = torch.zeros(len(params), columns.NUM_FLOATS)
    integers = torch.zeros(len(params), columns.NUM_INTEGERS, dtype=torch.int64)
    for slot, one in enumerate(params):
        floats[slot, columns.TEMPERATURE] = one.get("temperature", 1.0)
        floats[slot, columns.TOP_P] = one.get("top_p", 1.0)
        floats[slot, columns.MIN_P] = one.get("min_p", 0.0)
        integers[slot, columns.TOP_K] = int(one.get("top_k", vocab_size))
        integers[slot, columns.SEED] = slot
    counts = torch.full((len(params),), NUM_PROMPT, dtype=torch.int32)
    return SamplingTables(floats, integers, torch.zeros(len(params), 8).int(), counts + NUM_OUTPUT, counts)


def poisoned_workspace(max_rows: int, vocab_size: int) -> Workspace:
    workspace = Workspace(max_rows, vocab_size, CPU)
    tensors = (workspace.chunk_max, workspace.chunk_sum, workspace.chunk_kept, workspace.listed_logits)
    for tensor in (*tensors, *workspace.states, *workspace.pivots, *workspace.measures):
        tensor.fill_(float("nan"))
    for tensor in (workspace.num_listed, workspace.listed_tokens):
        tensor.fill_(1 << 30)
    return workspace


def choose(
    logits: torch.Tensor, tables: SamplingTables, slots: Sequence[int], workspace: Workspace | None = None
) -> list[int]:
    workspace = workspace or poisoned_workspace(len(slots), logits.shape[1])
    slots_on_device = torch.tensor(slots, dtype=torch.int32)
    tokens: list[int] = choose_tokens(logits, slots_on_device, tables, workspace, random=True, filtered=True).tolist()
    return tokens


def expect_reference(tokens: Sequence[int], logits: torch.Tensor, params: Sequence[dict[str, float]]) -> None:
    """Row i is slot i."""
    for row, one in enumerate(params):
        x = logits[row].double().numpy()
        if one.get("temperature") == 0.0:
            assert tokens[row] == x.argmax()
        else:
            p = reference.distribution(x, SamplingParams(**one))
            reference.expect_token(tokens[row], p, reference.uniform(row, NUM_OUTPUT))


@triton.jit
def _uniform_kernel(out_ptr, seeds_ptr, positions_ptr) -> None:  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out_ptr + row, uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row)))


def test_uniform_numbers_are_those_of_the_hash() -> None:
    pairs = [(0, 0), (2**63, 7), (2**64 - 1, 2**31 - 2), (123456789, 1000), (2**63 - 1, 1)]
    seeds = torch.tensor([as_int64(seed) for seed, _ in pairs])
    out = torch.zeros(len(pairs), dtype=torch.float64)
    _uniform_kernel[(len(pairs),)](out, seeds, torch.tensor([position for _, position in pairs], dtype=torch.int32))
    assert out.tolist() == [reference.uniform(*pair) for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab_size", "ties"),
    [(1, False), (7, True), (128, False), (129, False), (1000, True), (4097, False), (9001, True)],
)
def test_tokens_are_those_of_the_reference(vocab_size: int, ties: bool) -> None:
    params = [one for one in COMBINED if one.get("top_k", 0) <= vocab_size]
    # Flat and peaked rows, in any order.
    scale = torch.linspace(0.5, 5.0, len(params))[torch.randperm(len(params))]
    logits = torch.randn(len(params), vocab_size) * scale[:, None]
    if ties:
        logits = (logits * 2).round() / 2
    tokens = choose(logits, make_tables(params, vocab_size), range(len(params)))
    expect_reference(tokens, logits, params)


@pytest.mark.slow
def test_every_kind_of_search_is_taken() -> None:
    """Few of the most likely, many, a share of the mass, a bound by min_p, and what only the whole row can tell."""
    vocab_size = 20_011
    params = [
        {"top_k": 20, "top_p": 0.8},
        {"top_k": 6000},
        {"top_p": 0.9},
        {"min_p": 0.01},
        {"min_p": 0.01, "top_p": 0.9},
        {"top_k": 6000, "top_p": 0.9},
        {"top_k": 5000, "min_p": 1e-4},
        {},
    ]
    kinds = [search.LISTED, search.BY_COUNT, search.BY_MASS, search.KNOWN, search.BY_MASS, search.BY_BOTH]
    kinds += [search.BY_COUNT, search.UNFILTERED]
    logits = torch.randn(len(params), vocab_size)
    workspace = poisoned_workspace(len(params), vocab_size)
    tokens = choose(logits, make_tables(params, vocab_size), range(len(params)), workspace)
    expect_reference(tokens, logits, params)
    assert workspace.states[-1][:, 0].tolist() == [kind.value for kind in kinds]
    # Searches end with a list that fits.
    assert workspace.num_listed[[0, 1, 2, 4], 0].max() <= search.LIST_SIZE.value


@pytest.mark.slow
def test_more_ties_than_the_list_holds() -> None:
    vocab_size = 9001
    params = [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.1}, {"min_p": 0.3, "top_p": 0.9}]
    logits = torch.zeros(len(params), vocab_size)
    logits[:, ::2] = 1.0
    workspace = poisoned_workspace(len(params), vocab_size)
    tokens = choose(logits, make_tables(params, vocab_size), range(len(params)), workspace)
    expect_reference(tokens, logits, params)
    assert workspace.num_listed[:, 0].max() > search.LIST_SIZE.value


@pytest.mark.slow
def test_few_tokens_with_any_weight() -> None:
    vocab_size = 9001
    params = [
        {},
        {"top_k": 2},
        {"top_k": 40},
        {"top_k": 5000},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 500, "top_p": 0.7},
    ]
    logits = torch.full((len(params), vocab_size), float("-inf"))
    logits[:, 4000:4003] = torch.tensor([0.0, 1.0, 0.5])
    logits[:, -1] = -200.0
    tokens = choose(logits, make_tables(params, vocab_size), range(len(params)))
    expect_reference(tokens, logits, params)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_batch() -> None:
    vocab_size, params = 5003, COMBINED[3:]
    tables = make_tables(params, vocab_size)
    logits = torch.randn(len(params), vocab_size) * 2
    order = torch.randperm(len(params))
    together = choose(logits[order], tables, order.tolist())
    for row, slot in enumerate(order.tolist()[::3]):
        assert choose(logits[slot : slot + 1], tables, [slot]) == [together[3 * row]]


@pytest.mark.slow
def test_padding_and_strides() -> None:
    vocab_size = 700
    tables = make_tables(COMBINED, vocab_size)
    wide = torch.full((len(COMBINED) + 3, vocab_size + 9), float("nan"))
    logits = wide[:, :vocab_size]
    logits[3:] = torch.randn(len(COMBINED), vocab_size)
    slots = [-1, -1, -1, *range(len(COMBINED))]
    tokens = choose(logits, tables, slots, poisoned_workspace(40, vocab_size))
    assert tokens == [-1] * 3 + choose(logits[3:].contiguous(), tables, slots[3:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_no_distribution_fail_alone(bad: float) -> None:
    vocab_size = 4500
    tables = make_tables(COMBINED, vocab_size)
    logits = torch.randn(len(COMBINED), vocab_size)
    good = choose(logits, tables, range(len(COMBINED)))
    logits[::3, 4200] = bad
    logits[1::3] = float("-inf")
    expected = [token if row % 3 == 2 else -1 for row, token in enumerate(good)]
    assert choose(logits, tables, range(len(COMBINED))) == expected


def test_without_filters_two_launches_do() -> None:
    vocab_size = 1000
    params = [{}, {"temperature": 0.0}, {"temperature": 0.4}]
    tables, logits = make_tables(params, vocab_size), torch.randn(3, vocab_size) * 3
    workspace = poisoned_workspace(3, vocab_size)
    slots = torch.arange(3, dtype=torch.int32)
    tokens = choose_tokens(logits, slots, tables, workspace, random=True, filtered=False).tolist()
    expect_reference(tokens, logits, params)
    assert workspace.states[0].isnan().all()


def test_greedy_batches_take_the_largest() -> None:
    tables = make_tables([{"temperature": 0.0}] * 3, 1000)
    logits = torch.randint(-5, 5, (3, 1000)).float()
    slots = torch.tensor([2, 1, 0], dtype=torch.int32)
    tokens = choose_tokens(logits, slots, tables, Workspace(3, 1000, CPU), random=False, filtered=False)
    assert tokens.tolist() == logits.argmax(1).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("one", [{"temperature": 1.3}, {"top_p": 0.7}, {"top_k": 6, "top_p": 0.9}], ids=str)
def test_tokens_follow_the_distribution(one: dict[str, float]) -> None:
    vocab_size, num_rows = 8, 80
    row = torch.randn(vocab_size) * 1.5
    tables = make_tables([one] * num_rows, vocab_size)
    tokens = choose(row.expand(num_rows, -1), tables, range(num_rows))
    p = reference.distribution(row.double().numpy(), SamplingParams(**one))
    reference.expect_frequencies(np.bincount(tokens, minlength=vocab_size), p)
