"""Matrix products compiled on a CUDA device, with every implementation that a table may choose."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
from torch.nn import functional as F

from tests.support.device_waits import refuse_synchronization
from tests.support.kernel_inputs import assert_near, poisoned
from tokenmill_kernels import ops, reference
from tokenmill_kernels.gpu import linear_stream
from tokenmill_kernels.gpu.linear_choice import TOKEN_BLOCKS, Kind, Problem, StreamConfig, choice_table, token_block
from tokenmill_kernels.gpu.linear_stream import stream_argmax, stream_linear
from tokenmill_kernels.gpu.linear_tuning import prepare

pytestmark = pytest.mark.gpu

CUDA = "cuda"
HALVES = [torch.float16, torch.bfloat16]
SMALL = StreamConfig(32, 64, 3, 4, 2, 0, 2)
FLOAT32_TILES = StreamConfig(16, 32, 2, 4, 2, 0, 2)


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Kernels run compiled; every launch leaves the arrivals as it found them, and reads no partial sum of another."""
    assert not triton.knobs.runtime.interpret
    torch.manual_seed(0)
    workspace = linear_stream.workspace(torch.empty(0, device=CUDA).device)
    workspace.partials.fill_(float("nan"))
    yield
    assert not workspace.arrivals.any()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


def chosen(kind: Kind, num_tokens: int, weight: torch.Tensor) -> StreamConfig:
    """What the table says, and something small where it prefers the library."""
    problem = Problem(kind, weight.shape[0], weight.shape[1])
    return choice_table(weight.device).choose(problem, token_block(num_tokens)) or SMALL


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 31, 64])
@pytest.mark.parametrize(("num_rows", "k_size"), [(6144, 4096), (2048, 2048), (4096, 14336)])
def test_stream_linear(num_rows: int, k_size: int, num_tokens: int) -> None:
    x, weight = random(num_tokens, k_size), random(num_rows, k_size)
    config = chosen("linear", num_tokens, weight)
    with refuse_synchronization():
        result = stream_linear(x, weight, None, config)
    assert_near(result, reference.linear(x, weight))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("num_tokens", [1, 7, 9, 33])
@pytest.mark.parametrize(("num_rows", "k_size"), [(1001, 584), (48, 8), (2048, 768)])
def test_stream_linear_of_odd_shapes(num_rows: int, k_size: int, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((num_tokens, k_size), (num_rows, k_size), (num_rows,)))
    expected = reference.linear(x, weight, out_dtype=torch.float32)
    assert_near(stream_linear(x, weight, bias, SMALL), (expected + bias.float()).to(dtype))
    assert_near(stream_linear(x, weight, None, SMALL, out_dtype=torch.float32), expected)


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 64])
@pytest.mark.parametrize(("num_outputs", "k_size"), [(14336, 4096), (501, 584)])
def test_stream_gated_linear(num_outputs: int, k_size: int, num_tokens: int) -> None:
    x, weight, bias = random(num_tokens, k_size), random(2 * num_outputs, k_size) * 0.05, random(2 * num_outputs)
    config = chosen("gated", num_tokens, weight)
    assert_near(stream_linear(x, weight, bias, config, gated=True), reference.gated_linear(x, weight, bias))


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 64])
@pytest.mark.parametrize(("num_rows", "k_size"), [(128256, 2048), (33, 64)])
def test_stream_argmax(num_rows: int, k_size: int, num_tokens: int) -> None:
    x, weight = random(num_tokens, k_size), random(num_rows, k_size)
    weight[num_rows // 2 :: 3] = weight[: len(weight[num_rows // 2 :: 3])].clone()
    config = chosen("argmax", num_tokens, weight)
    scores = stream_linear(x, weight, None, config, out_dtype=torch.float32)
    assert torch.equal(stream_argmax(x, weight, config).long(), scores.argmax(dim=-1))
    x[-1, 3] = float("nan")
    assert stream_argmax(x, weight, config).tolist() == [*scores[:-1].argmax(dim=-1).tolist(), -1]


def test_float32() -> None:
    x, weight = random(5, 200, dtype=torch.float32), random(130, 200, dtype=torch.float32)
    assert_near(stream_linear(x, weight, None, FLOAT32_TILES), reference.linear(x, weight))
    assert_near(ops.linear(x, weight), reference.linear(x, weight))
    assert_near(ops.gated_linear(x, weight), reference.gated_linear(x, weight))


@pytest.mark.parametrize("num_tokens", [1, 64, 65, 300])
@pytest.mark.parametrize("k_size", [584, 581])
def test_public_functions(num_tokens: int, k_size: int) -> None:
    """More tokens than are streamed, and rows that are not aligned, go to the library."""
    x, weight, bias = random(num_tokens, k_size), random(1002, k_size), random(1002)
    assert_near(ops.linear(x, weight, bias), reference.linear(x, weight, bias))
    wide = ops.linear(x, weight, bias, out_dtype=torch.float32)
    assert_near(wide, reference.linear(x, weight, bias, out_dtype=torch.float32))
    gated, expected = ops.gated_linear(x, weight, bias), reference.gated_linear(x, weight, bias)
    # The library rounds gate and up before they are multiplied.
    torch.testing.assert_close(gated, expected, atol=0.05 * float(expected.abs().max()), rtol=0.02)
    x[0, 0] = float("nan")
    indices = ops.linear_argmax(x, weight)
    assert indices.dtype == torch.int32
    scores = reference.linear(x, weight, out_dtype=torch.float32)
    assert indices[0] == -1
    best = scores[1:].gather(1, indices[1:, None].long()).squeeze(1)
    torch.testing.assert_close(best, scores[1:].max(dim=-1).values, atol=1e-2, rtol=0)
    assert ops.linear(x[:0], weight, bias).shape == (0, 1002)


@pytest.mark.parametrize("num_tokens", TOKEN_BLOCKS)
def test_results_do_not_depend_on_timing(num_tokens: int) -> None:
    """Bit for bit, with other work on the device in between."""
    x, weight = random(num_tokens, 4096), random(4096, 4096)
    config = chosen("linear", num_tokens, weight)
    first = stream_linear(x, weight, None, config)
    noise = random(2048, 2048)
    for round_ in range(20):
        side = noise @ noise if round_ % 2 else noise
        assert torch.equal(stream_linear(x, weight, None, config), first)
        del side


@pytest.mark.parametrize("num_tokens", [1, 7, 32])
def test_a_chain_in_a_graph(num_tokens: int) -> None:
    """Launches overlap: each must wait for the results of the one before it, and only weights may be read early."""
    sizes = [(1536, 1024), (4096, 1536), (1024, 2048)]
    layers = [[random(*size) * size[1] ** -0.5 for size in sizes] for _ in range(6)]
    x, norm = random(num_tokens, 1024), torch.ones(1024, device=CUDA).bfloat16()

    def run(linear, gated_linear, add_rms_norm) -> torch.Tensor:
        hidden, residual = x, torch.zeros_like(x)
        for first, gate_up, last in layers:
            hidden = linear(gated_linear(linear(hidden, first), gate_up), last)
            hidden, residual = add_rms_norm(hidden, residual.clone(), norm, 1e-5)
        return residual

    def linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return stream_linear(hidden, weight, None, SMALL)

    def gated_linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return stream_linear(hidden, weight, None, SMALL, gated=True)

    run(linear, gated_linear, ops.add_rms_norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(linear, gated_linear, ops.add_rms_norm)
    for _ in range(3):
        x.copy_(random(num_tokens, 1024))
        out.copy_(poisoned(*out.shape, like=out))
        graph.replay()
        expected = run(reference.linear, reference.gated_linear, reference.add_rms_norm)
        assert float(F.cosine_similarity(out.float().flatten(), expected.float().flatten(), dim=0)) > 0.9995


def test_unknown_shapes_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.empty(0, device=CUDA).device
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path))
    shapes: list[tuple[ops.LinearUse, int, int]] = [("linear", 1016, 584), ("gated", 2048, 584), ("argmax", 5000, 584)]
    for expected in (len(shapes) * len(TOKEN_BLOCKS), 0):
        choice_table.cache_clear()
        assert prepare([Problem(*shape) for shape in shapes], torch.bfloat16, device) == expected
    assert prepare([Problem(*shape) for shape in shapes], torch.float32, device) == 0
    assert len(list(tmp_path.glob("*.json"))) == 1
    x, weight = random(3, 584), random(1016, 584)
    assert_near(ops.linear(x, weight), reference.linear(x, weight))
    choice_table.cache_clear()
