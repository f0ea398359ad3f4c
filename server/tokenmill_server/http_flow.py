"""What the connection of a request and whoever answers it tell each other beside the request: when to read, and that
the client has gone."""

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class Flow(FlowControl):
    """Reading also stops while the connection is full, whatever the application that reads a body wishes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._is_full = False
        self._is_wanted = True
        self._on_gone: Callable[[], None] | None = None

    def pause_reading(self) -> None:
        self._is_wanted = False
        super().pause_reading()

    def resume_reading(self) -> None:
        self._is_wanted = True
        if not self._is_full:
            super().resume_reading()

    def set_full(self, is_full: bool) -> None:
        self._is_full = is_full
        if is_full:
            super().pause_reading()
        elif self._is_wanted:
            super().resume_reading()

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        """Has `on_gone` called when the client goes before the answer to its current request is complete. Only a
        connection that is read tells that.

        Returns what ends that. The next request may watch already by then, and goes on watching: its client sends it
        as soon as the answer is complete, though whoever sent the answer still has something to do.
        """

        def stop() -> None:
            if self._on_gone is on_gone:
                self._on_gone = None

        self._on_gone = on_gone
        self.resume_reading()
        return stop

    def gone(self) -> None:
        """The client is gone."""
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()
