"""Vectors in the result of a step."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.outputs import StepPlan, StepResult

_NOT_NUMBERS = "the model gave a vector that is not made of numbers"


def vector_result(plan: StepPlan, vectors: NDArray[np.float32], elapsed_s: float = 0.0) -> StepResult:
    """The answer to a plan whose rows have all become `vectors` [num_reqs, size]."""
    token_ids, num_new = np.zeros((plan.num_reqs, 1), np.int32), np.ones(plan.num_reqs, np.int32)
    result = StepResult(plan.step, token_ids, num_new, elapsed_s=elapsed_s)
    return with_vectors(result, np.arange(plan.num_reqs), vectors)


def with_vectors(result: StepResult, rows: NDArray[np.int64], vectors: NDArray[np.float32]) -> StepResult:
    """`result`, in which `rows` have become `vectors` [num_rows, size]. One that is not all numbers is an error of its
    request alone."""
    is_sound = np.logical_and.reduce(np.isfinite(vectors), axis=1)
    num_new = result.num_new.copy()
    num_new[rows[~is_sound]] = 0
    return replace(
        result,
        num_new=num_new,
        vectors={row: vectors[index] for index, row in enumerate(rows.tolist()) if is_sound[index]},
        errors=result.errors | dict.fromkeys(rows[~is_sound].tolist(), _NOT_NUMBERS),
    )
