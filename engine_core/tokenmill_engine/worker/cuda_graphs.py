"""CUDA graphs of the forward pass for batches in which every request has one token."""

import logging
import time
from collections.abc import Callable, Sequence

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.progress import log_progress_bar
from tokenmill_engine.worker.model_runner import Forward

logger = logging.getLogger(__name__)

MAX_GRAPH_SIZE = 512


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes with a graph of their own: 1, 2, 4, then multiples of 8, up to `max_num_seqs` or 512."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return sorted({size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size < largest} | {largest})


class GraphedForward:
    """A forward pass that replays a graph where there is one for the batch, and else runs as it is."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def __call__(self, batch: ForwardBatch, output_rows: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [num_rows, hidden_size], valid until the next call."""
        only_decodes = output_rows is None and batch.num_decodes == batch.num_reqs
        recorded = self._graphs.get(batch.num_reqs) if only_decodes else None
        if recorded is None:
            return self._forward(batch, output_rows)
        graph, hidden = recorded
        graph.replay()
        return hidden

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], batch_of: Callable[[int], ForwardBatch]) -> None:
        """Record a graph for each of `sizes`; `batch_of` makes a batch of that many requests in the buffers that
        later batches will use. All graphs share one memory pool, so the largest goes first."""
        started = time.monotonic()
        pool = torch.cuda.graph_pool_handle()
        for size in log_progress_bar(logger, sorted(sizes, reverse=True), desc="capturing CUDA graphs"):
            batch = batch_of(size)
            # Kernels compile when they first run, which a capture does not allow.
            self._forward(batch, None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden = self._forward(batch, None)
            self._graphs[size] = (graph, hidden)
        torch.cuda.synchronize()
        logger.info("captured %d CUDA graphs: %.2f s", len(sizes), time.monotonic() - started)
