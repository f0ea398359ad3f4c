"""Workers on the CPUs of one machine that talk through torch.distributed's gloo: sockets on the loopback interface.

Nothing here is torch's default process group, so a process may be in several groups.
"""

import re
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tokenmill_engine.distributed.group import norm_sum
from tokenmill_engine.errors import ExchangeError, StartupError

_c10d: Any = torch.distributed
"""Torch's stubs leave out most of what is used here."""
_LOOPBACK = "127.0.0.1"
"""Not by the name of the interface, which differs between systems, nor of the host, which need not resolve. Nobody on
another machine can connect."""
_CALL_TIMEOUT = timedelta(days=1)
"""A member that is late is not lost: it may load weights from a slow disk, or be stopped. That one is gone shows at
once to those that wait for it; others wait for these, until they leave."""
_NUM_TAGS = 1 << 31
"""Gloo's are not negative and 32 bits long. Steps are counted further, but never as many of them are under way."""

_SOURCE_PLACE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h):\d+\]\s*")
"""As in `[enforce fail at /build/gloo/transport/tcp/device.cc:212]`."""
_GUESS = re.compile(r"\.? This is typically .*")
"""What gloo adds to most of its errors."""
_ENDED = re.compile(r"Connection closed by peer|Connection reset by peer|Broken pipe")
"""What gloo says if the process at the other end of a connection has ended."""


def join(
    rank: int, size: int, store_path: Path, timeout_s: float = 60.0, names: Sequence[str] | None = None
) -> "TorchGroup":
    """The group whose members meet at the file `store_path`, in a folder that is their user's alone. The file must be
    new to every group: the first member makes it, and the last one to leave takes it away, unless one is killed.
    `names` are those of all members in errors, after the word worker; their ranks if there are none.

    Raises:
        StartupError: some members did not come within `timeout_s`, or this machine has no working loopback interface.
    """
    timeout = timedelta(seconds=timeout_s)
    names = names or [str(each) for each in range(size)]
    if not store_path.parent.is_dir():
        # Torch would look for it for minutes.
        raise StartupError(f"worker {names[rank]} cannot join the others: the folder {store_path.parent} is gone")
    try:
        store = _c10d.FileStore(str(store_path), size)
        store.set(_member(rank), "here")
        _await_members(store, names, timeout)
        options = _c10d.ProcessGroupGloo._Options()
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = timeout
        processes = _c10d.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise StartupError(f"worker {names[rank]} cannot join the others: {_reason(error)}") from error
    processes._set_default_timeout(_CALL_TIMEOUT)
    return TorchGroup(processes, rank, size, names[rank])


def _await_members(store: Any, names: Sequence[str], timeout: timedelta) -> None:
    members = [_member(rank) for rank in range(len(names))]
    try:
        store.wait(members, timeout)
    except RuntimeError as error:
        missing = [name for name, member in zip(names, members, strict=True) if not store.check([member])]
        raise StartupError(
            f"worker{'s' if len(missing) > 1 else ''} {', '.join(missing)} did not join the others within "
            f"{timeout.total_seconds():g} s"
        ) from error


def _member(rank: int) -> str:
    return f"member {rank}"


class TorchGroup:
    """A `Group` and a `Chain`. A failed call means that the group is broken: ExchangeError."""

    def __init__(self, processes: Any, rank: int, size: int, name: str) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self._processes = processes
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self.received_tag: int | None = None
        """Of the last message from the member before."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        # Every piece of the sum is made by one member, which sends it to the others: so all have the same bits.
        self._wait(self._processes.allreduce([x]))
        return x

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return norm_sum(self.all_reduce(x), residual, weight, eps, out)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape
        gathered = x.new_empty(self.size * num_rows, width)
        self._wait(self._processes._allgather_base(gathered, x.contiguous()))
        return gathered.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, self.size * width)

    def send(self, x: torch.Tensor, tag: int) -> None:
        # What is sent is held on to until it was received. With so many later ones it was: no more steps are under way.
        self._sent.append((self._begin(self._processes.send, [x], self.rank + 1, tag % _NUM_TAGS), x))
        if len(self._sent) > self.size + 1:
            self._wait(self._sent.popleft()[0])

    def receive(self, out: torch.Tensor, tag: int) -> torch.Tensor:
        self._wait(self._begin(self._processes.recv, [out], self.rank - 1, tag % _NUM_TAGS))
        self.received_tag = tag
        return out

    def agree_min(self, value: int) -> int:
        smallest = torch.tensor([value], dtype=torch.int64)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MIN
        self._wait(self._processes.allreduce([smallest], options))
        return int(smallest)

    def close(self) -> None:
        """Leave. The other members' calls may fail from now on."""
        self._processes.shutdown()

    def _begin(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """For calls that may fail at once, where the neighbour is known to be gone."""
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise self._loss(error) from error

    def _wait(self, work: Any) -> None:
        try:
            work.wait(_CALL_TIMEOUT)
        except RuntimeError as error:
            raise self._loss(error) from error

    def _loss(self, error: RuntimeError) -> ExchangeError:
        """Clients read it: of sockets nothing, unless it is something else than the end of another worker."""
        message = f"worker {self._name} lost the connection to another worker"
        return ExchangeError(message if _ENDED.search(str(error)) else f"{message}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """What gloo says, without the places in its source files and its guesses."""
    text = str(error)
    if "Unable to find interface" in text:
        return f"this machine has no working loopback interface ({_LOOPBACK})"
    lines = _GUESS.sub("", _SOURCE_PLACE.sub("", text)).splitlines()
    return lines[0].strip() if lines else type(error).__name__
