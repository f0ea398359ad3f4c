"""The host's side of the steps in flight: entries of pinned memory, which the kernels read and write directly.

Entries are taken in turn, and the device counts along, so nothing has to be sent to tell it which one is next.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.errors import EngineDeadError
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.results import StepTimes
from tokenmill_engine.worker.slots import Write
from tokenmill_kernels.gpu import exchange
from tokenmill_kernels.gpu.exchange import EntryShape

NUM_ENTRIES = 8
"""More steps are never in flight; one that is to be the ninth waits for the first."""

_MAX_WORDS, _MAX_RUNS, _MAX_VALUES = 4096, 512, 8192
_LONGEST_OF_WORDS = 16
"""Longer lists of values go as a run."""


class StepEntry:
    """What one step sends to the device, and what it gets back."""

    def __init__(
        self,
        sent: NDArray[np.int32],
        received: NDArray[np.int32],
        before: torch.Tensor,
        shape: EntryShape,
        on_cuda: bool,
    ) -> None:
        self._shape = shape
        self._headers = sent[: exchange.NUM_HEADERS]
        rows, changes = sent[exchange.NUM_HEADERS : shape.words_start], sent[shape.words_start : shape.runs_start]
        self._ends, self._slots, self._sample_slots, self._deciding = rows.reshape(4, shape.num_rows)
        self._offsets, self._words = changes.reshape(2, shape.max_words)
        self._runs, self._values = sent[shape.runs_start : shape.values_start], sent[shape.values_start :]
        self._index = np.arange(shape.num_rows + 1, dtype=np.int32)
        self.received = received
        """[1 + num_rows] number of the step, then its tokens."""
        self.before = before
        """int64 [2], ns: how long a stage before this one took, the slowest one, and how long one encoded media; 0 if
        there is none."""
        self.events = (_timed_event(), _timed_event()) if on_cuda else None
        """Start and end of the step on the device."""
        self.in_flight: StepTokens | None = None
        self._is_abandoned = False
        """The device was told to receive it, and no end of the step is known."""

    def begin(self) -> None:
        """A step has the entry from now on. Waits until the device is done with the one before: for the end of a step
        that is still under way; for all that is enqueued if that step failed once the device had been told of it."""
        if self.in_flight is not None:
            self.in_flight.wait()
            self.in_flight = None
        if self._is_abandoned and self.events is not None:
            # Recorded here and not when the device is told, where every step would have to: failures may wait.
            self.events[1].record()
            self.events[1].synchronize()
        self._is_abandoned = False
        self.mark_start()

    def mark_start(self) -> None:
        """The step starts behind what is enqueued now; the time before that is not its own."""
        if self.events is not None:
            self.events[0].record()

    def note_before(self, times: torch.Tensor) -> None:
        """Enqueue: take `times` of the stages before, int64 [2], from the device."""
        self.before.copy_(times, non_blocking=True)

    def send(self) -> None:
        """The device was told to receive it."""
        self._is_abandoned = True

    def finish(self, turn: int, num_samples: int) -> "StepTokens":
        """All of step number `turn` is enqueued; it reports `num_samples` tokens."""
        if self.events is not None:
            self.events[1].record()
        self._is_abandoned = False
        self.in_flight = StepTokens(self, turn, num_samples)
        return self.in_flight

    def clear(self) -> None:
        """The entry of a step without requests."""
        self._headers[:] = 0
        self.in_flight = None
        self._is_abandoned = False

    def write(self, plan: StepPlan, changes: Sequence[Write]) -> tuple[StepRows, list[Write]]:
        """Fill in the rows of `plan` and as many of the `changes` as fit.

        Returns: the rows for the host, and the changes that are to be sent in another way.
        """
        num_reqs = plan.num_reqs
        self._slots[:num_reqs] = plan.slots
        only_decodes = plan.num_decodes == num_reqs
        if only_decodes:
            num_tokens = num_reqs
            query_start = self._index[: num_reqs + 1]
            sample_rows, sample_slots = self._index[:num_reqs].astype(np.int64), plan.slots
        else:
            query_start = np.zeros(num_reqs + 1, np.int32)
            np.cumsum(plan.num_scheduled, out=query_start[1:])
            num_tokens = int(query_start[-1])
            sample_rows = np.flatnonzero(plan.samples)
            sample_slots = plan.slots[sample_rows]
            self._ends[:num_reqs] = query_start[1:]
            self._sample_slots[: len(sample_rows)] = sample_slots
            self._deciding[: len(sample_rows)] = query_start[sample_rows + 1] - 1
        num_words, num_runs, rest = self._write_changes(changes)
        self._headers[:6] = num_reqs, len(sample_rows), num_tokens, only_decodes, num_words, num_runs
        max_tokens = int((plan.num_computed + plan.num_scheduled).max())
        return StepRows(query_start, sample_rows, sample_slots, max_tokens), rest

    def _write_changes(self, changes: Sequence[Write]) -> tuple[int, int, list[Write]]:
        """(words, runs) that were written, and the changes that were not."""
        if not changes:
            return 0, 0, []
        shape, num_values = self._shape, 0
        offsets: list[int] = []
        words: list[int] = []
        runs: list[int] = []
        rest: list[Write] = []
        for offset, values in changes:
            count = len(values)
            if isinstance(values, list) and count <= _LONGEST_OF_WORDS and len(words) + count <= shape.max_words:
                offsets += range(offset, offset + count)
                words += values
            elif num_values + count <= shape.max_values and len(runs) < 3 * shape.max_runs:
                self._values[num_values : num_values + count] = values
                runs += (offset, num_values, count)
                num_values += count
            else:
                rest.append((offset, values))
        # Converted together: each by itself would take a microsecond, in every step.
        self._offsets[: len(words)], self._words[: len(words)] = offsets, words
        self._runs[: len(runs)] = runs
        return len(words), len(runs) // 3, rest


class StepTokens:
    """As `results.HostTokens`. Who waits may be another thread than the one that begins steps."""

    def __init__(self, entry: StepEntry, turn: int, num_samples: int) -> None:
        self._entry, self._turn, self._num_samples = entry, turn, num_samples
        self._lock = threading.Lock()
        self._result: tuple[NDArray[np.int32], StepTimes] | None = None

    def wait(self) -> tuple[NDArray[np.int32], StepTimes]:
        # The step that has the entry next waits here too, and writes to it only then.
        with self._lock:
            if self._result is None:
                self._result = self._fetch()
            return self._result

    def _fetch(self) -> tuple[NDArray[np.int32], StepTimes]:
        """Take the result out of the entry."""
        entry, elapsed_s = self._entry, 0.0
        if entry.events is not None:
            started, finished = entry.events
            finished.synchronize()
            elapsed_s = started.elapsed_time(finished) * 1e-3
        slowest_s, encoder_s = (each * 1e-9 for each in entry.before.tolist())
        if entry.received[0] != self._turn & exchange.TURN_MASK:
            raise EngineDeadError(f"the device answered step {entry.received[0]} of its count instead of {self._turn}")
        times = StepTimes(max(elapsed_s, slowest_s), encoder_s)
        return entry.received[1 : 1 + self._num_samples].copy(), times


class StepRing:
    """The entries in turn, for steps of at most `num_rows` requests."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.shape = EntryShape(num_rows, _MAX_WORDS, _MAX_RUNS, _MAX_VALUES)
        on_cuda = device.type == "cuda"
        self.sent = torch.zeros((NUM_ENTRIES, self.shape.size), dtype=torch.int32, pin_memory=on_cuda)
        self.received = torch.zeros((NUM_ENTRIES, 1 + num_rows), dtype=torch.int32, pin_memory=on_cuda)
        before = torch.zeros((NUM_ENTRIES, 2), dtype=torch.int64, pin_memory=on_cuda)
        self.turn = torch.zeros(2, dtype=torch.int64, device=device)
        """Of the device: see `exchange.receive`."""
        self._turn = 0
        self._entries = [
            StepEntry(*buffers, self.shape, on_cuda)
            for buffers in zip(self.sent.numpy(), self.received.numpy(), before, strict=True)
        ]

    @property
    def num_counted(self) -> int:
        """Steps that the device was told of since `clear`."""
        return self._turn

    def begin(self) -> StepEntry:
        """The entry that the device receives next."""
        entry = self._entries[self._turn % NUM_ENTRIES]
        entry.begin()
        return entry

    def count(self) -> int:
        """The device was told to receive the entry of `begin`. Returns the number of the step."""
        self._entries[self._turn % NUM_ENTRIES].send()
        self._turn += 1
        return self._turn

    def clear(self) -> None:
        """Begin anew, after steps that were only enqueued to run their kernels: none is under way, none was sent."""
        if self.turn.is_cuda:
            torch.cuda.synchronize(self.turn.device)
        for entry in self._entries:
            entry.clear()
        self.turn.zero_()
        self._turn = 0


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
