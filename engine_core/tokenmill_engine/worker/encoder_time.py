"""How long a step encodes media: on the CPU by the clock, on a GPU between two events on the stream, which nobody waits
for: they are read once the step, which comes behind them, is known to be done."""

import time

import torch


class EncoderTime:
    """Of one step; begun when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._events = _timed_event(), _timed_event()
            self._events[0].record()
        else:
            self._began = time.perf_counter()

    def end(self) -> None:
        """Everything is encoded, or enqueued."""
        if self._events is not None:
            self._events[1].record()
        else:
            self._seconds = time.perf_counter() - self._began

    def seconds(self) -> float:
        """Of a step that is done."""
        return self._seconds if self._events is None else self._events[0].elapsed_time(self._events[1]) * 1e-3


def _timed_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
