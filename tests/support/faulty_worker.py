"""A worker's process with a fault: the real one, except that one of its ranks, or all, does something else once.

`WORKER_FAULT` says what, as `RANK MOMENT DEED`: rank a number or `all`; moment `import`, `start`, `encode`, in the
second layer of the encoder with the first image behind the start, or a number of plans that it carries out before; deed
one of

    raise   an error that is the same for all ranks
    starve  another one: no memory
    differ  an error that is not
    lose    an EngineDeadError, as when the device is lost
    refuse  a StartupError
    exit    end with status 7
    hang    write `hanging RANK` into the file `WORKER_NOTES` and wait
    leave   leave the other workers, then as `hang`; only between plans
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.worker import process


def main() -> None:
    rank = int(sys.argv[sys.argv.index("--rank") + 1])
    who, moment, deed = os.environ["WORKER_FAULT"].split()
    if who in ("all", str(rank)):
        if moment == "import":
            do(deed, rank)
        if moment == "encode":
            replace_encoder(rank, deed)
        else:
            replace_worker(rank, moment, deed)
    process.main()


def replace_encoder(rank: int, deed: str) -> None:
    from tokenmill_engine.models.vision.blocks import EncoderLayer
    from tokenmill_engine.worker.worker import Worker

    initialize, compute = Worker.initialize, EncoderLayer.__call__
    due_in: int | None = None

    def watched_initialize(worker: Worker) -> Any:
        nonlocal due_in
        capacity = initialize(worker)
        due_in = 1
        return capacity

    def faulty_compute(layer: EncoderLayer, *inputs: Any) -> Any:
        nonlocal due_in
        if due_in is not None:
            due_in, is_due = (due_in - 1, False) if due_in else (None, True)
            if is_due:
                do(deed, rank)
        return compute(layer, *inputs)

    Worker.initialize, EncoderLayer.__call__ = watched_initialize, faulty_compute  # type: ignore[method-assign]


def replace_worker(rank: int, moment: str, deed: str) -> None:
    from tokenmill_engine.worker.worker import Worker

    initialize, execute = Worker.initialize, Worker.execute
    num_plans = 0

    def faulty_initialize(worker: Worker) -> Any:
        capacity = initialize(worker)
        if moment == "start":
            do(deed, rank)
        return capacity

    def faulty_execute(worker: Worker, plan: Any) -> Any:
        nonlocal num_plans
        num_plans += 1
        if moment.isdigit() and num_plans == int(moment) + 1:
            if deed == "leave":
                worker._group.close()
                del worker._group._processes  # type: ignore[attr-defined]  # only then the connections end
            do("hang" if deed == "leave" else deed, rank)
        return execute(worker, plan)

    Worker.initialize, Worker.execute = faulty_initialize, faulty_execute  # type: ignore[method-assign]


def do(deed: str, rank: int) -> NoReturn:
    if deed == "hang":
        with Path(os.environ["WORKER_NOTES"]).open("a") as notes:
            notes.write(f"hanging {rank}\n")
        while True:
            signal.pause()
    if deed == "exit":
        os._exit(7)
    if deed == "starve":
        raise RuntimeError("out of memory")
    if deed == "refuse":
        raise StartupError(f"rank {rank} has not enough of everything; use --less")
    if deed == "lose":
        raise EngineDeadError("the device is lost")
    raise ValueError("a fault" if deed == "raise" else f"a fault of {rank}")


if __name__ == "__main__":
    main()
