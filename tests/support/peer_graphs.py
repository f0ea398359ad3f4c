"""As `peer_member`, in CUDA graphs: `peer_graphs RANK SIZE STORE_PATH cuda graphs`.

Each graph makes all kinds of calls of one shape, with other numbers in each replay, and counts on the device what is
not as torch computes it. Graphs are replayed in any order, with the same calls outside of graphs between, and the host
waits only now and then.
"""

import random

import torch

from tests.support.kernel_inputs import TOLERANCE
from tests.support.peer_member import EPS, Call, Inputs, main, say
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_kernels import ops

SHAPES = (
    (1, 4096, "bfloat16"), (2, 4096, "bfloat16"), (7, 4096, "float16"), (32, 4096, "bfloat16"), (133, 4096, "bfloat16"),
    (256, 4096, "bfloat16"), (300, 5120, "bfloat16"), (3, 1000, "float16"), (9, 2048, "float32"),
)  # fmt: skip
NUM_REPLAYS, REPLAYS_AT_ONCE, LAYERS = 1200, 60, 3


class Recorded:
    """The calls of one shape."""

    def __init__(self, index: int, rank: int, size: int, device: torch.device, peers: PeerReduce) -> None:
        num_rows, width, dtype = SHAPES[index]
        self._inputs = Inputs.of(Call("norm", num_rows, width, dtype), index, size, device)
        self._rank, self._peers = rank, peers
        self.wrong = torch.zeros(4, dtype=torch.int64, device=device)
        """Numbers that were wrong in sums, residuals, norms, and what was gathered."""

    def run(self) -> None:
        for _ in range(LAYERS):
            self._layer()

    def _layer(self) -> None:
        parts, residual, weight = self._inputs.parts, self._inputs.residual, self._inputs.weight
        for part in parts:
            part.copy_(part.roll(1, dims=-1))
        own, total = parts[self._rank], parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        total = total.to(own.dtype)
        stream = (total.float() + residual.float()).to(own.dtype)
        summed = self._peers.all_reduce(own.clone())
        normed, left = self._peers.add_rms_norm(own, residual.clone(), weight, EPS)
        first_normed, first_left = self._peers.add_rms_norm(own, None, weight, EPS)
        gathered = self._peers.all_gather(own[:, :8])
        self.wrong[0] += (summed != total).sum() + (first_left != total).sum()
        self.wrong[1] += (left != stream).sum()
        self.wrong[2] += self._far(normed, stream) + self._far(first_normed, total)
        self.wrong[3] += (gathered != torch.cat([part[:, :8] for part in parts], dim=1)).sum()

    def _far(self, normed: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
        expected = ops.rms_norm(stream, self._inputs.weight, EPS)
        limit = 2 * TOLERANCE[normed.dtype]
        return (~torch.isclose(normed.float(), expected.float(), rtol=limit, atol=limit)).sum()


def replay_graphs(_: str, rank: int, size: int, device: torch.device, peers: PeerReduce) -> None:
    every = [Recorded(index, rank, size, device, peers) for index in range(len(SHAPES))]
    stream, graphs = torch.cuda.Stream(device), []
    for recorded in every:
        recorded.run()
    torch.cuda.synchronize()
    say({"replayed": 0, "wrong": [recorded.wrong.tolist() for recorded in every]})
    for recorded in every:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            recorded.run()
        graphs.append(graph)
    order = random.Random(0)
    for turn in range(NUM_REPLAYS):
        index = order.randrange(len(every))
        if turn % 10 == 9:
            every[index].run()
        else:
            graphs[index].replay()
        if turn % REPLAYS_AT_ONCE == REPLAYS_AT_ONCE - 1:
            torch.cuda.synchronize()
            say({"replayed": turn + 1, "wrong": [recorded.wrong.tolist() for recorded in every]})


if __name__ == "__main__":
    main(replay_graphs)
