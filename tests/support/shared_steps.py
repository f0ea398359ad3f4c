"""A process that is one of several workers which have a model between them, with steps as a GPU runs them and sums
through peer memory: `shared_steps RANK SIZE STORE_PATH MODEL exact|padded`.

Kernels are interpreted and the model is on the CPU; in place of NCCL there is gloo. It writes one line of JSON: the
tokens of all requests, and how many sums and gathers were too large for memory that both map.
"""

import faulthandler
import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch

from tests.engine_core.worker.test_cuda_steps import Calls, generate, make_runner
from tests.support.generations import SAMPLED
from tests.support.step_driver import GREEDY
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.distributed.nccl_group import NcclGroup, exchange
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_engine.distributed.torch_group import TorchGroup, join
from tokenmill_engine.ipc.lifecycle import exit_at_once

HANG_S = 400.0
MAX_BYTES = 4096
"""Larger sums go the other way."""


class Gloo:
    """As NCCL."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group
        self.num_calls = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        self.num_calls += 1
        self._group.all_reduce(x)

    def all_gather(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self.num_calls += 1
        out.copy_(self._group.all_gather(x.view(1, -1)).view(out.shape))


def joined(rank: int, size: int, store: Path) -> tuple[Group, Gloo | None]:
    """The group as on GPUs, and what is too large for memory that all map."""
    if size == 1:
        return ALONE, None
    host = join(rank, size, store)
    gloo = Gloo(host)
    peers = PeerReduce(rank, size, torch.device("cpu"), lambda data: exchange(host, data), max_bytes=MAX_BYTES)
    return NcclGroup(host, gloo, peers), gloo


def main() -> None:
    rank, size, store, folder, mode = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5]
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    group, gloo = joined(rank, size, store)
    calls = Calls()
    runner = make_runner(calls, padded=mode == "padded", folder=Path(folder), group=group)
    params = [GREEDY if index % 2 else sampled for index, sampled in enumerate(SAMPLED)]
    generations = generate(runner, params, depth=2)
    group.agree_min(0)  # nobody leaves before all are done
    num_large = 0 if gloo is None else gloo.num_calls
    sys.stdout.write(json.dumps({"tokens": [each.output for each in generations], "large": num_large}) + "\n")
    # As workers end: gloo's threads may still be at work.
    exit_at_once(0)


if __name__ == "__main__":
    main()
