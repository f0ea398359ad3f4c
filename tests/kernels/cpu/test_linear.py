"""Products with packed weights, against the reference and against themselves in other batches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_inputs import assert_near, relative_error
from tokenmill_kernels import reference
from tokenmill_kernels.cpu import ops as cpu
from tokenmill_kernels.cpu.library import load, set_num_threads
from tokenmill_kernels.cpu.packed import PackedWeight, can_pack, pack, packed_size

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [
    (0, 64, 17),
    (1, 2, 1),
    (1, 576, 960),
    (7, 64, 17),
    (17, 100, 81),
    (33, 576, 16),
    (81, 36, 700),
    (200, 1536, 576),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "in_features", "out_features"), SIZES)
def test_linear(dtype: torch.dtype, num_tokens: int, in_features: int, out_features: int) -> None:
    x = torch.randn(num_tokens, in_features + 2).to(dtype)[:, :in_features]
    weight = torch.randn(out_features, in_features + 4).to(dtype)[:, :in_features]
    bias = torch.randn(out_features).to(dtype)
    packed = pack(weight)
    assert_near(cpu.linear(x, packed, bias), reference.linear(x, weight, bias))
    wide = cpu.linear(x, packed, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert relative_error(wide, reference.linear(x, weight, out_dtype=torch.float32)) < 1e-5


@given(
    rows=st.integers(1, 260), first=st.integers(0, 259), dtype=st.sampled_from(DTYPES), num_threads=st.integers(1, 3)
)
def test_a_row_does_not_depend_on_its_batch(rows: int, first: int, dtype: torch.dtype, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(260, 66, generator=generator).to(dtype)
    packed = pack(torch.randn(90, 66, generator=generator).to(dtype))
    whole = cpu.linear(x, packed)
    set_num_threads(num_threads)
    part = cpu.linear(x[first : first + rows], packed)
    assert torch.equal(part, whole[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(0, 5), (1, 1), (1, 49), (17, 4096), (70, 333)])
def test_argmax(dtype: torch.dtype, num_tokens: int, vocab_size: int) -> None:
    """Small integers: every product is exact, and equal maxima are common."""
    x = torch.randint(-2, 3, (num_tokens, 8)).to(dtype)
    weight = torch.randint(-2, 3, (vocab_size, 8)).to(dtype)
    assert torch.equal(cpu.linear_argmax(x, pack(weight)), reference.linear_argmax(x, weight))


def test_argmax_of_negative_rows_is_not_the_padding() -> None:
    packed = pack(torch.full((3, 4), -1.0))
    assert cpu.linear_argmax(torch.ones(1, 4), packed).tolist() == [0]


def test_argmax_marks_the_row_with_a_nan_alone() -> None:
    x = torch.ones(3, 4)
    x[1, 2] = float("nan")
    assert cpu.linear_argmax(x, pack(torch.eye(4))).tolist() == [0, -1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_reads_packed_rows(dtype: torch.dtype) -> None:
    weight = torch.randn(81, 34).to(dtype)
    ids = torch.tensor([80, 0, 17, 17], dtype=torch.int32)
    assert torch.equal(cpu.embedding(ids, pack(weight)), weight[ids.long()])


def test_packed_matrices_are_padded_to_panels() -> None:
    packed = pack(torch.ones(17, 6))
    assert packed.shape == (17, 6)
    assert packed.data.numel() == packed_size(17, 6) == 32 * 6
    assert packed.data.sum() == 17 * 6


def test_what_cannot_be_packed_stays_plain() -> None:
    assert not can_pack(torch.float16, 64)
    assert not can_pack(torch.bfloat16, 63)
    assert can_pack(torch.float32, 63)
    odd = torch.ones(2, 63, dtype=torch.bfloat16)
    assert cpu.pack_linear(odd) is odd


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_may_lie_anywhere(dtype: torch.dtype) -> None:
    """Rows an odd number of elements apart, and columns that are apart."""
    weight = torch.randn(17, 6).to(dtype)
    for x in (torch.randn(5, 7).to(dtype)[:, 1:], torch.randn(6, 5).to(dtype).T):
        assert_near(cpu.linear(x, pack(weight)), reference.linear(x, weight))
        assert torch.equal(
            cpu.linear_argmax(x, pack(weight)), cpu.linear(x, pack(weight), out_dtype=torch.float32).argmax(1)
        )


@pytest.mark.parametrize("x", [torch.ones(2, 5), torch.ones(2, 4).bfloat16(), torch.ones(4)])
def test_rows_that_do_not_fit_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="does not take x"):
        cpu.linear(x, pack(torch.ones(3, 4)))


def test_large_weights_are_aligned_to_huge_pages() -> None:
    packed = pack(torch.ones(2048, 1024))
    assert packed.data.data_ptr() % (2 << 20) == 0
    assert isinstance(packed, PackedWeight)


def test_number_of_threads() -> None:
    library = load()
    assert library is not None
    set_num_threads(3)
    assert library.tokenmill_num_threads() == 3
    with pytest.raises(ValueError, match="at least 1, not 0"):
        set_num_threads(0)
