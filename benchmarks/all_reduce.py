"""Times sums over the GPUs of one host, through peer memory and through NCCL, with and without the norm behind them.

    python -m benchmarks.all_reduce --size N [--output FILE] [--symmetric-memory]

Rows of 4096 bfloat16 numbers, as an 8B Llama has them. Each figure is the median over replays of a CUDA graph with many
calls in a row, in microseconds a call. `one` and `two` are one-shot and two-shot; with a `+` the kernels start while
those before them end. Every way is first seen to give NCCL's sum. `--symmetric-memory` times torch's one-shot as well.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tokenmill_engine.distributed import nccl
from tokenmill_engine.distributed.group import Group
from tokenmill_engine.distributed.nccl_group import exchange
from tokenmill_engine.distributed.peer_reduce import PeerReduce
from tokenmill_engine.distributed.torch_group import join
from tokenmill_kernels import ops

WIDTH, DTYPE = 4096, torch.bfloat16
NUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LARGEST_BYTES = NUM_ROWS[-1] * WIDTH * DTYPE.itemsize
CALLS, REPLAYS, EPS = 64, 25, 1e-5
_HANG_S = 100.0
"""Members that say nothing for so long are stuck."""
WAYS = {"one": (LARGEST_BYTES, False), "one+": (LARGEST_BYTES, True), "two": (0, False), "two+": (0, True)}
"""Largest size that is one-shot, and whether kernels overlap."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the measurement."""

    host: Group
    device: torch.device
    collectives: nccl.Communicator
    ways: dict[str, PeerReduce]

    @classmethod
    def join(cls, rank: int, size: int, store: Path) -> "Member":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        host = join(rank, size, store)
        unique_id = exchange(host, nccl.new_id() if rank == 0 else bytes(nccl.ID_BYTES))[0]
        tell = partial(exchange, host)
        ways = {
            name: PeerReduce(rank, size, device, tell, LARGEST_BYTES, one_shot_bytes=limit, overlap=overlap)
            for name, (limit, overlap) in WAYS.items()
        }
        return cls(host, device, nccl.Communicator(rank, size, device, unique_id), ways)

    def rows(self) -> Iterator[dict[str, float]]:
        """Of the table."""
        for num_rows in NUM_ROWS:
            self._check(num_rows)
            x, residual = (torch.zeros(num_rows, WIDTH, dtype=DTYPE, device=self.device) for _ in range(2))
            weight = torch.ones(WIDTH, dtype=DTYPE, device=self.device)
            row = {"bytes": float(x.nbytes), "nccl": self._time(partial(self.collectives.all_reduce, x))}
            row |= {name: self._time(partial(way.all_reduce, x)) for name, way in self.ways.items()}
            row["nccl, norm"] = self._time(partial(self._nccl_norm, x, residual, weight))
            for name, way in self.ways.items():
                row[f"{name}, norm"] = self._time(partial(way.add_rms_norm, x, residual, weight, EPS))
            yield row

    def _nccl_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        self.collectives.all_reduce(x)
        ops.add_rms_norm(x, residual, weight, EPS)

    def _check(self, num_rows: int) -> None:
        """Every way gives what NCCL does, but for rounding: that may round after every member."""
        torch.manual_seed(self.host.rank)
        x = torch.randn(num_rows, WIDTH, device=self.device).to(DTYPE)
        expected = x.clone()
        self.collectives.all_reduce(expected)
        weight, residual = torch.ones(WIDTH, dtype=DTYPE, device=self.device), torch.zeros_like(x)
        normed = ops.rms_norm(expected, weight, EPS)
        for name, way in self.ways.items():
            for actual, wanted in (
                (way.all_reduce(x.clone()), expected),
                (way.add_rms_norm(x, residual.clone(), weight, EPS)[0], normed),
            ):
                far = float(((actual.float() - wanted.float()).abs() / (1 + wanted.float().abs())).max())
                if not far < 0.1:
                    raise SystemExit(f"{name} is wrong by {far} for {num_rows} rows")

    def _time(self, call: Call) -> float:
        """Microseconds."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(CALLS):
                call()
        self.host.agree_min(0)
        times: list[float] = []
        for _ in range(REPLAYS + 2):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
        return statistics.median(times[2:])

    def symmetric_rows(self, folder: Path) -> Iterator[dict[str, float]]:
        """Of torch's own one-shot sum over symmetric memory."""
        from torch.distributed import _symmetric_memory as symmetric  # not there in every build

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder / 'torch'}", rank=self.host.rank, world_size=self.host.size
        )
        name = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        for num_rows in NUM_ROWS:
            x = symmetric.empty(num_rows * WIDTH, dtype=DTYPE, device=self.device)
            symmetric.rendezvous(x, name)
            x.zero_()
            call = partial(torch.ops.symm_mem.one_shot_all_reduce, x, "sum", name)
            yield {"bytes": float(x.nbytes), "torch": self._time(call)}


def run(rank: int, size: int, folder: str, symmetric: bool, results: Connection) -> None:
    """A process. Sends rows, and None when all are done."""
    member = Member.join(rank, size, Path(folder) / "store")
    with torch.inference_mode():
        for row in member.rows():
            results.send(row)
        if symmetric:
            for row in member.symmetric_rows(Path(folder)):
                results.send(row)
    member.host.agree_min(0)
    results.send(None)


def measure(size: int, symmetric: bool) -> Iterator[dict[str, float]]:
    """Rows of the first member, as they come.

    Raises:
        SystemExit: a member failed or is stuck.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        connections, processes = [], []
        for rank in range(size):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(rank, size, folder, symmetric, sending), daemon=True)
            process.start()
            sending.close()
            connections.append(receiving)
            processes.append(process)
        try:
            while True:
                rows = [received(rank, connection) for rank, connection in enumerate(connections)]
                if rows[0] is None:
                    return
                yield rows[0]
        finally:
            for process in processes:
                process.kill()
                process.join()


def received(rank: int, connection: Connection) -> dict[str, float] | None:
    """What a member sends next."""
    if not connection.poll(_HANG_S):
        raise SystemExit(f"member {rank} is stuck: nothing for {_HANG_S:g} s")
    try:
        row: dict[str, float] | None = connection.recv()
    except EOFError:
        raise SystemExit(f"member {rank} failed") from None
    return row


COLUMNS = ("nccl", *WAYS, "nccl, norm", *(f"{name}, norm" for name in WAYS))


def best(row: dict[str, float], behind: str) -> str:
    """The quickest way of ours."""
    return min((f"{name}{behind}" for name in WAYS), key=row.__getitem__)


def formatted(row: dict[str, float]) -> str:
    """A line of the table."""
    if "torch" in row:
        return f"{row['bytes'] / 1024:7.0f}{row['torch']:9.1f} (torch, one-shot)"
    ratios = "".join(
        f"{row[f'nccl{behind}'] / row[best(row, behind)]:7.2f} {best(row, behind).split(',')[0]:<4}"
        for behind in ("", ", norm")
    )
    return f"{row['bytes'] / 1024:7.0f}" + "".join(f"{row[name]:9.1f}" for name in COLUMNS) + ratios


def limits(rows: list[dict[str, float]], plus: str, behind: str) -> str:
    """Up to where which way wins."""
    names = [f"one{plus}{behind}", f"two{plus}{behind}", f"nccl{behind}"]
    winners = [(row["bytes"], min(names, key=row.__getitem__)) for row in rows]
    return ", ".join(f"{num_bytes / 1024:.0f} KiB {winner.split(',')[0]}" for num_bytes, winner in winners)


def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, required=True, help="GPUs, the first so many")
    parser.add_argument("--output", type=Path, help="write the rows there, as JSON")
    parser.add_argument("--symmetric-memory", action="store_true", help="time torch's symmetric memory as well")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.size:
        parser.error(f"there are {torch.cuda.device_count()} GPUs")
    print(f"{torch.cuda.get_device_name()}, {arguments.size} GPUs; microseconds a call")  # noqa: T201
    print(f"{'KiB':>7}" + "".join(f"{name.replace(', norm', ' n'):>9}" for name in COLUMNS) + "  nccl / best ours")  # noqa: T201
    rows: list[dict[str, float]] = []
    for row in measure(arguments.size, arguments.symmetric_memory):
        rows.append(row)
        print(formatted(row), flush=True)  # noqa: T201
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    ours = [row for row in rows if "nccl" in row]
    for text, behind in (("sum", ""), ("sum and norm", ", norm")):
        for plus in ("", "+"):
            print(f"quickest {text}{' that overlaps' if plus else ''}: {limits(ours, plus, behind)}")  # noqa: T201
    sys.stdout.flush()


if __name__ == "__main__":
    main()
