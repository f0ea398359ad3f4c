"""What a measurement of matrix kernels costs; the measurement itself needs a GPU (`tests/gpu/test_linear.py`)."""

import pytest

from tokenmill_kernels.gpu.linear_tuning import num_matrices

MIB = 1 << 20


@pytest.mark.parametrize(
    ("matrix_bytes", "count"),
    [(64 * 64 * 2, 64), (MIB, 64), (2 * MIB, 64), (4 * MIB, 32), (100 * MIB, 1), (1 << 30, 1)],
)
def test_matrices_are_many_enough_to_be_cold_but_never_more_than_a_graph_bears(matrix_bytes: int, count: int) -> None:
    assert num_matrices(matrix_bytes) == count
