"""The weight-streaming kernel in the interpreter, whose matrix product does not know bfloat16."""

import pytest
import torch

from tests.support.kernel_inputs import assert_near
from tokenmill_kernels import reference
from tokenmill_kernels.gpu import linear_stream
from tokenmill_kernels.gpu.linear_choice import StreamConfig
from tokenmill_kernels.gpu.linear_stream import can_stream, stream_argmax, stream_linear

WHOLE_TILES = StreamConfig(16, 32, 3, 4, 2, 1, 2)
HALVES = StreamConfig(16, 32, 3, 4, 7, 2, 2)
ANY_CUTS = StreamConfig(16, 32, 3, 4, 7, 0, 2)
EIGHT_ROWS = StreamConfig(8, 64, 3, 4, 2, 1, 2)
CONFIGS = [WHOLE_TILES, HALVES, ANY_CUTS, EIGHT_ROWS]


@pytest.fixture(autouse=True)
def poisoned_partials() -> None:
    """No partial sum is read before it was written, and every launch leaves the arrivals as it found them."""
    workspace = linear_stream.workspace(torch.device("cpu"))
    assert not workspace.arrivals.any()
    workspace.partials.fill_(float("nan"))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "k_size"), [(1, 16, 32), (1, 251, 72), (5, 100, 200), (8, 33, 136), (17, 48, 96)]
)
def test_linear(num_tokens: int, num_rows: int, k_size: int, dtype: torch.dtype, config: StreamConfig) -> None:
    x, weight = torch.randn(num_tokens, k_size).to(dtype), torch.randn(num_rows, k_size).to(dtype)
    bias = torch.randn(num_rows).to(dtype)
    assert can_stream(x, weight)
    assert_near(stream_linear(x, weight, bias, config), reference.linear(x, weight, bias))
    wide = stream_linear(x, weight, None, config, out_dtype=torch.float32)
    assert_near(wide, reference.linear(x, weight, out_dtype=torch.float32))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("num_tokens", "num_rows", "k_size"), [(1, 32, 32), (3, 250, 72), (20, 70, 160)])
def test_gated_linear(num_tokens: int, num_rows: int, k_size: int, config: StreamConfig) -> None:
    x, weight, bias = torch.randn(num_tokens, k_size), torch.randn(num_rows, k_size), torch.randn(num_rows)
    assert_near(stream_linear(x, weight, bias, config, gated=True), reference.gated_linear(x, weight, bias))


@pytest.mark.parametrize("config", CONFIGS)
def test_argmax(config: StreamConfig) -> None:
    # Few different values, so that every row has ties.
    x, weight = torch.randint(-1, 2, (7, 40)).float(), torch.randint(-1, 2, (300, 40)).float()
    assert torch.equal(stream_argmax(x, weight, config).long(), reference.linear_argmax(x, weight))


def test_rows_that_are_no_numbers_fail_alone() -> None:
    x, weight = torch.randn(6, 64), torch.randn(90, 64)
    weight[:, 0] = 1.0
    expected = reference.linear_argmax(x, weight).tolist()
    x[1, 3] = float("nan")
    x[4, 0] = float("inf")
    assert stream_argmax(x, weight, ANY_CUTS).tolist() == [expected[0], -1, *expected[2:4], -1, expected[5]]


def test_tokens_may_have_a_stride() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(40, 64)
    wide[:, 64:] = float("nan")
    assert_near(stream_linear(wide[:, :64], weight, None, ANY_CUTS), reference.linear(wide[:, :64], weight))


def test_what_the_kernel_does_not_take() -> None:
    x, weight = torch.randn(4, 64), torch.randn(40, 64)
    assert can_stream(x, weight)
    assert not can_stream(x[:0], weight)
    assert not can_stream(torch.randn(65, 64), weight)
    assert not can_stream(torch.randn(64, 4).t(), weight)
    assert not can_stream(x[:, :62], weight[:, :62])
    assert not can_stream(x[:, :61], torch.randn(40, 61))
    assert not can_stream(x, torch.randn(40 * 64 + 1)[1:].view(40, 64))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (StreamConfig(1 << 17, 32, 3, 4, 2, 0, 2), "too much scratch memory"),
        (StreamConfig(2, 32, 3, 4, 2, 0, 2), "too many tiles"),
    ],
)
def test_nothing_is_launched_past_the_scratch_memory(config: StreamConfig, message: str) -> None:
    x, weight = torch.randn(64, 64), torch.empty((1 << 18) + 2, 64)
    assert can_stream(x, weight)
    with pytest.raises(AssertionError, match=message):
        stream_linear(x, weight, None, config)
