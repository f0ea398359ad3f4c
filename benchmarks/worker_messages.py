"""What it costs to run a step in other processes: `python -m benchmarks.worker_messages`, from the repository's root.

A plan of `--rows` decodes goes through shared memory to as many processes as there would be workers; one of them
answers with a result of that size. Nobody computes anything, so what is left is what a step pays for its workers'
being processes. Medians in µs; more processes than cores wait for each other.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from tokenmill_engine.ipc.shared_ring import RingFiles, RingReader, RingWriter, create_ring
from tokenmill_engine.outputs import BlockAppend, StepPlan, StepResult
from tokenmill_engine.worker.wire import decode_answer, decode_plan, encode_answer, encode_plan

_CAPACITY = 1 << 20
_BLOCK_SIZE = 16


def make_plan(num_rows: int) -> StepPlan:
    """Decodes; one in 16 begins a block."""
    ones = np.ones(num_rows, np.int32)
    appends = [BlockAppend(slot, 0, 60, [slot]) for slot in range(0, num_rows, _BLOCK_SIZE)]
    return StepPlan(
        1, np.arange(num_rows, dtype=np.int32), ones, 960 * ones, np.ones(num_rows, bool), num_rows, [], appends
    )


def make_result(num_rows: int) -> StepResult:
    return StepResult(1, np.arange(num_rows, dtype=np.int32)[:, None], np.ones(num_rows, np.int32), elapsed_s=0.01)


def be_worker(rank: int, plans: RingFiles, answers: RingFiles, num_rows: int) -> None:
    """Decodes each plan until an empty message comes; rank 0 answers."""
    reader = RingReader(*plans.of_reader(rank), rank)
    writer = RingWriter(answers.memory, answers.wakes, answers.space)
    result = make_result(num_rows)
    while message := reader.receive():
        decode_plan(message)
        if rank == 0:
            writer.send(encode_answer(result))


def median_us(work: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def measure(num_workers: int, num_rows: int, count: int) -> tuple[float, float]:
    """Of handing a plan over, and of a round trip, with all there is to encode and to decode."""
    plans, answers = create_ring(num_workers, _CAPACITY), create_ring(1, _CAPACITY)
    children = []
    for rank in range(num_workers):
        pid = os.fork()
        if pid == 0:
            be_worker(rank, plans, answers, num_rows)
            os._exit(0)
        children.append(pid)
    writer = RingWriter(plans.memory, plans.wakes, plans.space)
    reader = RingReader(*answers.of_reader(0))
    plan = make_plan(num_rows)
    handed: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        for message in encode_plan(plan):
            writer.send(message)
        handed.append(time.perf_counter() - began)
        decode_answer(reader.receive())

    median_us(step, count // 10)
    handed.clear()
    round_trip = median_us(step, count)
    writer.send(b"")
    for pid in children:
        os.waitpid(pid, 0)
    for each in (writer, reader, plans, answers):
        each.close()
    return statistics.median(handed) * 1e6, round_trip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5000)
    args = parser.parse_args()
    plan, result = make_plan(args.rows), make_result(args.rows)
    (plan_bytes,), result_bytes = encode_plan(plan), encode_answer(result)
    lines = [
        f"plan of {args.rows} rows: {len(plan_bytes)} bytes, encode {median_us(lambda: encode_plan(plan), 2000):.1f}, "
        f"decode {median_us(lambda: decode_plan(plan_bytes), 2000):.1f}",
        f"its result: {len(result_bytes)} bytes, encode {median_us(lambda: encode_answer(result), 2000):.1f}, "
        f"decode {median_us(lambda: decode_answer(result_bytes), 2000):.1f}",
    ]
    for num_workers in args.workers:
        handed, round_trip = measure(num_workers, args.rows, args.steps)
        lines.append(f"{num_workers} workers: hand over {handed:.0f}, round trip {round_trip:.0f}")
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
