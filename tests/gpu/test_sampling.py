"""The sampler on a CUDA device: the tokens and scores of the CPU, the distribution, graphs, and bad rows."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine_core.sampling import reference
from tests.engine_core.sampling.conftest import Request, SamplerHarness
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.sampling import table as bits
from tokenmill_engine.sampling.drawing import sample_rows
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.tokens import INVALID_TOKEN
from tokenmill_kernels import sampling_columns as columns

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LARGE_VOCAB = 128_256
VOCAB_SIZES = (5003, LARGE_VOCAB)
"""Kernels are compiled for each."""

ON_DEVICE = [
    Request(SamplingParams(temperature=0.0)),
    Request(SamplingParams()),
    Request(SamplingParams(temperature=0.0, presence_penalty=0.5), (1, 2), (3, 3, 4)),
    Request(SamplingParams(repetition_penalty=1.2, top_p=0.9), (1,), (2, 3)),
    Request(SamplingParams(frequency_penalty=0.3, min_p=0.05), (1,), (2, 3, 3)),
    *(Request(SamplingParams(temperature=0.8, **filters)) for filters in reference.FILTERS),
    Request(SamplingParams(top_k=30, top_p=0.9)),
    Request(SamplingParams(top_k=2000)),
    Request(SamplingParams(top_k=2000, top_p=0.5)),
]
REQUESTS = [
    *ON_DEVICE,
    Request(SamplingParams(temperature=0.0, logprobs=3, presence_penalty=0.5), (1, 2), (3, 3, 4)),
    Request(SamplingParams(temperature=0.0, logit_bias={5: 4.0}, min_tokens=3), (1, 2), (3,), (6, 7)),
    Request(SamplingParams(allowed_token_ids=(4, 8, 30, 31), logprobs=0)),
    Request(SamplingParams(bad_words_token_ids=((4,), (3, 9)), repetition_penalty=1.2), (1,), (2, 3)),
]


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | {"seed": seed})


def start_all(harness: SamplerHarness, requests: Sequence[Request]) -> None:
    """Slot i has request i, over and over, and the seed i."""
    for slot in range(harness.num_slots):
        request = requests[slot % len(requests)]
        harness.start(slot, replace(request, params=_seeded(request.params, slot)))


def random_logits(num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """On the CPU; flat and peaked rows."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(0.7, 5.0, num_rows)[torch.randperm(num_rows, generator=generator)]
    return torch.randn(num_rows, vocab_size, generator=generator) * scale[:, None]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_and_scores_equal_the_cpu(vocab_size: int) -> None:
    num_slots = 2 * len(REQUESTS)
    on_cuda, on_cpu = SamplerHarness(vocab_size, num_slots, CUDA), SamplerHarness(vocab_size, num_slots, CPU)
    for harness in (on_cuda, on_cpu):
        start_all(harness, REQUESTS)
    slots = range(num_slots)
    logits = random_logits(num_slots, vocab_size, vocab_size)
    ours, theirs = on_cuda.sample(logits.cuda(), slots), on_cpu.sample(logits, slots)
    # A number that falls on a border between two tokens may round to either side: about one in a thousand draws from
    # a large vocabulary.
    different = (ours.token_ids.cpu() != theirs.token_ids).sum()
    assert different <= (1 if vocab_size == LARGE_VOCAB else 0)
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    if not different:
        torch.testing.assert_close(ours.logprobs.logprobs.cpu(), theirs.logprobs.logprobs, atol=1e-4, rtol=0)
        assert ours.logprobs.token_ids.cpu().equal(theirs.logprobs.token_ids)
        assert ours.logprobs.ranks.cpu().equal(theirs.logprobs.ranks)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_kernels_give_the_tokens_of_the_operators(vocab_size: int) -> None:
    num_slots = 3 * len(ON_DEVICE)
    harness = SamplerHarness(vocab_size, num_slots, CUDA)
    start_all(harness, ON_DEVICE)
    logits = random_logits(num_slots, vocab_size, 1).cuda()
    order = torch.randperm(num_slots, device=CUDA).int()
    padded = torch.cat((order, torch.full((3,), -1, dtype=torch.int32, device=CUDA)))
    rows = torch.cat((logits, torch.full((3, vocab_size), float("nan"), device=CUDA)))
    expected = sample_rows(rows.clone(), padded, bits.ON_DEVICE, harness.table, harness.tokens)
    tokens = harness.sampler.sample_on_device(rows.clone(), padded, bits.ON_DEVICE)
    assert (tokens != expected).sum() <= (1 if vocab_size == LARGE_VOCAB else 0)
    assert tokens[-3:].tolist() == [INVALID_TOKEN] * 3
    # The same again, and alone.
    assert tokens.equal(harness.sampler.sample_on_device(rows.clone(), padded, bits.ON_DEVICE))
    for row in range(0, num_slots, 7):
        alone = harness.sampler.sample_on_device(rows[row : row + 1].clone(), order[row : row + 1], bits.ON_DEVICE)
        assert alone.tolist() == [int(tokens[row])]


def test_a_graph_follows_parameters_tokens_and_padding() -> None:
    """Captured once; replayed with other logits, slots, parameters and counts."""
    num_slots, num_rows = 40, 24
    harness = SamplerHarness(LARGE_VOCAB, num_slots, CUDA)
    start_all(harness, ON_DEVICE)
    logits = torch.empty(num_rows, LARGE_VOCAB, device=CUDA)
    slots = torch.full((num_rows,), -1, dtype=torch.int32, device=CUDA)
    logits.copy_(random_logits(num_rows, LARGE_VOCAB, 0))
    harness.sampler.sample_on_device(logits, slots, bits.ON_DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = harness.sampler.sample_on_device(logits, slots, bits.ON_DEVICE)
    different = 0
    for replay in range(6):
        start_all(harness, ON_DEVICE[replay:] + ON_DEVICE[:replay])
        harness.tokens.num_tokens += replay
        used = num_rows - 4 * replay
        slots.fill_(-1)
        slots[:used] = torch.randperm(num_slots)[:used]
        logits.copy_(random_logits(num_rows, LARGE_VOCAB, replay))
        expected = sample_rows(logits.clone(), slots, bits.ON_DEVICE, harness.table, harness.tokens)
        tokens.fill_(-7)
        graph.replay()
        different += int((tokens != expected).sum())
        assert (tokens[used:] == INVALID_TOKEN).all()
    assert different <= 1


def test_a_graph_follows_masks() -> None:
    """Captured without any; replayed with masks of other rows each time, and with none in between."""
    num_slots = num_rows = 24
    harness, on_cpu = SamplerHarness(LARGE_VOCAB, num_slots, CUDA), SamplerHarness(LARGE_VOCAB, num_slots, CPU)
    for each in (harness, on_cpu):
        start_all(each, ON_DEVICE)
    logits = random_logits(num_rows, LARGE_VOCAB, 0).cuda()
    slots = torch.arange(num_rows, dtype=torch.int32, device=CUDA)
    scratch = logits.clone()
    harness.sampler.sample_on_device(scratch, slots, bits.ON_DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = harness.sampler.sample_on_device(scratch, slots, bits.ON_DEVICE)
    rng = np.random.default_rng(0)
    different = 0
    for replay in range(6):
        rows = np.sort(rng.permutation(num_rows)[: 4 * replay]).astype(np.int32)
        words = rng.integers(-(2**31), 2**31, (len(rows), LARGE_VOCAB // 32)).astype(np.int32)
        words[::2, 1:] = 0
        masks = SampleMasks(rows, words) if len(rows) and replay != 3 else None
        scratch.copy_(logits)
        harness.sampler.load_masks(masks)
        graph.replay()
        expected = on_cpu.sampler.sample(logits.cpu(), np.arange(num_rows, dtype=np.int32), 10, masks).token_ids
        different += int((tokens.cpu() != expected).sum())
    assert different <= 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    num_slots = len(REQUESTS)
    harness = SamplerHarness(LARGE_VOCAB, num_slots, CUDA)
    start_all(harness, REQUESTS)
    slots = np.arange(num_slots, dtype=np.int32)
    logits = random_logits(num_slots, LARGE_VOCAB, 0).cuda()
    harness.sampler.sample(logits.clone(), slots, 10)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        harness.sampler.sample(logits, slots, 10)
        # Another batch, so that everything is prepared anew.
        harness.sampler.sample(logits, slots[::-1].copy(), 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"top_k": 40},
        {"top_p": 0.8},
        {"min_p": 0.05},
        {"temperature": 1.3, "top_k": 3000},
        {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.01},
        {"frequency_penalty": 0.5, "repetition_penalty": 1.4, "top_p": 0.95},
    ],
    ids=str,
)
def test_tokens_follow_the_reference_distribution(params: dict[str, float]) -> None:
    """Many seeds, drawn by replays of a graph from one peaked row."""
    num_rows, num_replays = 512, 40
    harness = SamplerHarness(LARGE_VOCAB, num_rows, CUDA)
    request = Request(SamplingParams(**params), (1, 2), (3, 3, 4))
    start_all(harness, [request])
    row = torch.randn(LARGE_VOCAB, generator=torch.Generator().manual_seed(3)) * 3.5
    features = harness.sampler.features(np.arange(num_rows, dtype=np.int32))
    slots = torch.arange(num_rows, dtype=torch.int32, device=CUDA)
    logits, row_on_device = torch.empty(num_rows, LARGE_VOCAB, device=CUDA), row.to(CUDA)

    def step() -> torch.Tensor:
        logits.copy_(row_on_device)
        harness.table.integers[:, columns.SEED] += num_rows
        return harness.sampler.sample_on_device(logits, slots, features)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = step()
    counts = torch.zeros(LARGE_VOCAB, dtype=torch.int64, device=CUDA)
    for _ in range(num_replays):
        graph.replay()
        counts += torch.bincount(tokens, minlength=LARGE_VOCAB)
    edited = reference.edited_logits(row.double().numpy(), request.params, request.prompt, request.output, ())
    reference.expect_frequencies(counts.cpu().numpy(), reference.distribution(edited, request.params))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_rows_that_are_not_numbers_harm_no_other(vocab_size: int, bad: float) -> None:
    harness = SamplerHarness(vocab_size, 2 * len(REQUESTS), CUDA)
    start_all(harness, REQUESTS)
    slots = range(harness.num_slots)
    logits = random_logits(len(slots), vocab_size, 0).cuda()
    good = harness.sample(logits, slots).token_ids.tolist()
    half = len(slots) // 2
    logits[:half] = bad
    tokens = harness.sample(logits, slots).token_ids.tolist()
    torch.cuda.synchronize()
    assert tokens == [INVALID_TOKEN] * half + good[half:]
