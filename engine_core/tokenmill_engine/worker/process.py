"""A worker's process, `python -m tokenmill_engine.worker.process`; `executor.worker_pool` says with which arguments.

It carries plans out in order, as they come, and sleeps between them. It ends when its engine core tells it to, or is
gone; Ctrl-C and SIGTERM, which may go to all processes of a server at once, are the launcher's to answer.
"""

import argparse
import contextlib
import gc
import importlib
import logging
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tokenmill_engine.errors import TokenmillError, describe_os_error
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.lifecycle import become_child, exit_at_once, watch_parent
from tokenmill_engine.ipc.logs import configure_logging
from tokenmill_engine.ipc.shared_objects import SharedObjects
from tokenmill_engine.ipc.shared_ring import RingReader, RingWriter
from tokenmill_engine.worker.control import (
    FromWorker,
    RefusedAlike,
    ToWorker,
    WorkerFailed,
    WorkerReady,
    WorkerStart,
    chain_store,
    stage_store,
)
from tokenmill_engine.worker.gpu_start import begin_context, import_cuda
from tokenmill_engine.worker.near_cpus import stay_near_gpu
from tokenmill_engine.worker.step_loop import StepLoop

logger = logging.getLogger("tokenmill_engine.worker.process")  # the module itself runs as `__main__`

_IMPORTED = ("tokenmill_engine.worker.worker", "tokenmill_engine.worker.step_errors")
"""What takes seconds to import, begun while the configuration is on its way."""
_GROUP_MODULE = "tokenmill_engine.distributed.torch_group"


class WorkerProcess:
    """A started worker, its plans and its answers."""

    def __init__(
        self,
        start: WorkerStart,
        rank: int,
        size: int,
        modules: Future[dict[str, ModuleType]],
        shared: SharedObjects,
    ) -> None:
        """`shared`: as in `Worker`. Raises TokenmillError, or what goes wrong, if it cannot start."""
        worker_module, errors_module = (modules.result()[name] for name in _IMPORTED)
        self._as_engine_error = errors_module.as_engine_error
        others = {} if size == 1 else _join(start, rank, modules.result()[_GROUP_MODULE])
        self._worker = worker_module.Worker(start.config, rank, shared=shared, **others)
        self._reports = rank == start.config.parallel.reporting_rank
        self.capacity = self._worker.initialize()

    def run(self, plans: RingReader, answers: RingWriter, agreed: threading.Semaphore) -> None:
        """Carry out plans until an empty message comes. `agreed`: as in `StepLoop`."""
        StepLoop(self._worker, answers, self._as_engine_error, agreed, reports=self._reports).run(plans)


def _join(start: WorkerStart, rank: int, module: ModuleType) -> dict[str, Any]:
    """The workers that have the same layers, and those with the stages of the model that this one has a part of."""
    num_members, num_stages = start.config.parallel.tensor_parallel_size, start.config.parallel.pipeline_parallel_size
    stage, member = divmod(rank, num_members)

    def name(stage: int, member: int) -> str:
        return f"{start.engine_rank}.{stage * num_members + member}"

    others = {}
    if num_members > 1:
        names = [name(stage, each) for each in range(num_members)]
        others["group"] = module.join(member, num_members, Path(stage_store(start.store_path, stage)), names=names)
    if num_stages > 1:
        names = [name(each, member) for each in range(num_stages)]
        others["chain"] = module.join(stage, num_stages, Path(chain_store(start.store_path, member)), names=names)
    return others


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--plans", type=int, nargs=3, required=True, help="descriptors of the ring to read")
    parser.add_argument("--answers", type=int, nargs=3, required=True, help="descriptors of the ring to write")
    parser.add_argument("--segments", type=int, nargs="*", default=[], help="descriptors of memory with media in it")
    parser.add_argument("--gpu", action="store_true", help="may compute on the visible GPU with its rank")
    args = parser.parse_args()
    become_child(f"worker {args.rank}", args.parent_pid)
    channel: ControlChannel[ToWorker] = ControlChannel.from_fd(args.control_fd, ToWorker)
    memory, wake, space = args.plans
    plans = RingReader(memory, wake, space, args.rank)
    memory, wake, space = args.answers
    answers = RingWriter(memory, (wake,), space)
    modules = _import_ahead(args.size, args.gpu)
    cpus: set[int] = set()
    if args.gpu:
        begin_context(args.rank)
        cpus = stay_near_gpu(args.rank)
    try:
        start = channel.receive()
    except ChannelClosedError:
        exit_at_once(1)
    if not isinstance(start, WorkerStart):
        raise TypeError(f"the first message must be WorkerStart, not {type(start).__name__}")
    name = f"worker {start.engine_rank}.{args.rank}"
    become_child(name, args.parent_pid)
    configure_logging(_log_level(start, args.rank), name)
    if cpus:
        logger.info("runs on %d CPUs next to its GPU", len(cpus))
    agreed = threading.Semaphore(0)
    watch_parent(channel, lambda message: agreed.release() if isinstance(message, RefusedAlike) else None, None)
    try:
        process = WorkerProcess(start, args.rank, args.size, modules, SharedObjects(args.segments))
    except TokenmillError as error:
        _fail_start(channel, error.message)
    except OSError as error:
        _fail_start(channel, f"{name} cannot start: {describe_os_error(error)}")
    except Exception as error:
        at = time.monotonic()
        logger.exception("%s cannot start", name)
        _fail_start(channel, f"{name} cannot start: {type(error).__name__}: {error}", at)
    # What exists now lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    _tell(channel, WorkerReady(process.capacity))
    try:
        process.run(plans, answers, agreed)
    except Exception:
        logger.exception("%s failed", name)
        exit_at_once(1)
    exit_at_once(0)


def _import_ahead(size: int, on_gpu: bool) -> Future[dict[str, ModuleType]]:
    names = _IMPORTED if size == 1 else (*_IMPORTED, _GROUP_MODULE)
    modules: Future[dict[str, Any]] = Future()

    def work() -> None:
        try:
            modules.set_result({name: importlib.import_module(name) for name in names})
        except BaseException as error:
            modules.set_exception(error)
        if on_gpu:
            # Who needs it imports it again, and hears what is wrong with it.
            with contextlib.suppress(Exception):
                import_cuda()

    threading.Thread(target=work, name="import", daemon=True).start()
    return modules


def _log_level(start: WorkerStart, rank: int) -> str:
    """What all ranks would say alike is said by the first."""
    level = start.config.observability.log_level
    return "WARNING" if level == "INFO" and rank > 0 else level


def _fail_start(channel: ControlChannel[ToWorker], message: str, at: float | None = None) -> NoReturn:
    _tell(channel, WorkerFailed(" ".join(message.split()), time.monotonic() if at is None else at))
    exit_at_once(1)


def _tell(channel: ControlChannel[ToWorker], message: FromWorker) -> None:
    """How the start went. An engine core that is gone wants no worker any more."""
    try:
        channel.send(message)
    except ChannelClosedError:
        exit_at_once(1)


if __name__ == "__main__":
    main()
