"""CUDA graphs by what they were captured for. All share one pool of memory, in which nothing outlives a graph."""

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

Call = Callable[[], torch.Tensor]


class Replay(Protocol):
    """What runs a call again, if it was recorded."""

    def replay(self, key: Hashable) -> torch.Tensor | None:
        """Enqueue what was recorded for `key` on the current stream; its result, or None if there is nothing."""


class GraphStore:
    """Graphs of calls that read and write the same buffers each time. Captured on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Forget all graphs; their memory goes back to the allocator."""
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, key: Hashable) -> torch.Tensor | None:
        """As `Replay`."""
        recorded = self._graphs.get(key)
        if recorded is None:
            return None
        graph, result = recorded
        graph.replay()
        return result

    @torch.inference_mode()
    def capture(self, key: Hashable, call: Call) -> None:
        """Record the graph of `call`. Those that need the most memory should come first.

        Its kernels must have run before: to compile or load one, the device may have to be waited for.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = call()
            finally:
                graph.capture_end()
        self._graphs[key] = graph, result

    @torch.inference_mode()
    def rehearse(self, calls: Sequence[Call]) -> None:
        """Run each call as it is, on the stream that captures: libraries set up their workspace for it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(self._stream)
