"""How an engine core shows the launcher that it lives and gets work done."""

import contextlib
from collections.abc import Callable

from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import EngineControl, Ping, Pulse


class Heartbeat:
    """The busy loop counts its turns here; the thread that reads the control channel answers pings, also while a turn
    takes long. Nothing of it costs a step more than an addition."""

    def __init__(self, channel: ControlChannel[EngineControl]) -> None:
        self.num_turns = 0
        """Written by the loop alone."""
        self.has_work: Callable[[], bool] = bool
        """Whether somebody waits for the current turn to end. Called from another thread than the loop's."""
        self._channel = channel

    def answer(self, message: EngineControl) -> None:
        """Answers the launcher, if that was a ping."""
        if isinstance(message, Ping):
            # Where the launcher is gone, the reader of the channel is about to find out.
            with contextlib.suppress(ChannelClosedError):
                self._channel.send(Pulse(self.num_turns, self.has_work()))
