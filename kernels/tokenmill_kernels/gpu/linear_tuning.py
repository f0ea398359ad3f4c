"""Measures which implementation multiplies a matrix fastest, for shapes that the tables do not know. Once per card."""

# mypy: allow-untyped-calls

import logging
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from triton.errors import TritonError

from tokenmill_kernels.gpu.compilation import CompileError, compile_ahead, compile_failure
from tokenmill_kernels.gpu.linear_choice import (
    TOKEN_BLOCKS,
    ChoiceTable,
    Kind,
    Problem,
    StreamConfig,
    can_stream_dtype,
    choice_table,
)
from tokenmill_kernels.gpu.linear_library import library_argmax, library_gated_linear, library_linear
from tokenmill_kernels.gpu.linear_stream import can_stream, stream_argmax, stream_linear

logger = logging.getLogger(__name__)

_COLD_BYTES = 128 << 20
"""A measurement walks matrices of that many bytes together, so that they come from memory and not from a cache."""
_MAX_MATRICES = 64
"""More are not walked: small ones, which a cache may hold then, are not worth more launches."""
_ROUNDS = 5
_MAX_CANDIDATES = 3

Call = Callable[[torch.Tensor, torch.Tensor], object]
"""A function of tokens and weight."""

_LIBRARY_CALLS: dict[Kind, Call] = {
    "linear": partial(library_linear, bias=None),
    "gated": partial(library_gated_linear, bias=None),
    "argmax": library_argmax,
}


def prepare(problems: Iterable[Problem], dtype: torch.dtype, device: torch.device) -> int:
    """Measures what no table knows about `problems` and keeps the results; returns how many choices that were.

    Takes device memory for the largest matrix, and milliseconds per choice once kernels are compiled. Without that
    memory nothing is measured.
    """
    table = choice_table(device)
    unknown = [
        (problem, block_t)
        for problem in dict.fromkeys(problems)
        for block_t in TOKEN_BLOCKS
        if can_stream_dtype(dtype, device) and not table.is_known(problem, block_t)
    ]
    if not unknown:
        return 0
    started = time.monotonic()
    try:
        bench = _Bench(max(_COLD_BYTES // dtype.itemsize, *(p.num_rows * p.k_size for p, _ in unknown)), dtype, device)
        cases = [bench.case(problem, block_t, table) for problem, block_t in unknown]
        bench.compile(cases)
        table.remember({case.key: bench.fastest(case) for case in cases})
    except torch.OutOfMemoryError:
        logger.warning("no memory is left to measure matrix kernels with: their choice may not be the best")
        return 0
    logger.info("measured the fastest of %d matrix kernels in %.1f s", len(unknown), time.monotonic() - started)
    return len(unknown)


def num_matrices(matrix_bytes: int) -> int:
    """How many matrices of that size a measurement walks."""
    return max(min(_COLD_BYTES // matrix_bytes, _MAX_MATRICES), 1)


@dataclass(frozen=True, slots=True)
class _Case:
    """A choice to make."""

    key: str
    x: torch.Tensor
    weights: list[torch.Tensor]
    library: Call
    streamed: dict[StreamConfig, Call]


class _Bench:
    """Times implementations on random matrices."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.empty(num_elements, dtype=dtype, device=device).normal_(0, 0.02)
        self._stream = torch.cuda.Stream(device)

    def case(self, problem: Problem, block_t: int, table: ChoiceTable) -> _Case:
        """Inputs, and what may be chosen for them."""
        size = problem.num_rows * problem.k_size
        count = num_matrices(size * self._numbers.itemsize)
        weights = list(self._numbers[: count * size].view(count, problem.num_rows, problem.k_size))
        x = torch.randn(block_t, problem.k_size, device=self._numbers.device).to(self._numbers.dtype)
        candidates = table.candidates(problem, block_t)[:_MAX_CANDIDATES] if can_stream(x, weights[0]) else []
        streamed = {config: _stream_call(problem.kind, config) for config in candidates}
        return _Case(problem.key(block_t), x, weights, _LIBRARY_CALLS[problem.kind], streamed)

    def compile(self, cases: Iterable[_Case]) -> None:
        """Compiles all kernels side by side. What does not compile fails again, alone, when it is timed."""
        calls = [partial(call, case.x, case.weights[0]) for case in cases for call in case.streamed.values()]
        with suppress(CompileError):
            compile_ahead(calls, self._numbers.device)

    def fastest(self, case: _Case) -> StreamConfig | None:
        """The fastest of the case's implementations, None if that is the library."""
        times: dict[StreamConfig | None, float] = {None: self._time(case.library, case.x, case.weights)}
        for config, call in case.streamed.items():
            try:
                times[config] = self._time(call, case.x, case.weights)
            except (TritonError, RuntimeError) as error:
                # Some tiles do not fit some cards.
                if compile_failure(error) is None:
                    raise
        return min(times, key=times.__getitem__)

    def _time(self, call: Call, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
        """Milliseconds for all weights, from a graph, as steps run."""
        with torch.cuda.stream(self._stream):
            call(x, weights[0])
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for weight in weights:
                call(x, weight)
            graph.capture_end()
            graph.replay()
            times: list[float] = []
            for _ in range(_ROUNDS):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end))
        return statistics.median(times)


def _stream_call(kind: Kind, config: StreamConfig) -> Call:
    if kind == "argmax":
        return partial(stream_argmax, config=config)
    return partial(stream_linear, bias=None, config=config, gated=kind == "gated")
