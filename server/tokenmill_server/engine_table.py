"""Every engine core of a server as the launcher knows it: who serves, who is lost, and where each is reached.

It is fed with updates by whoever watches the processes: `EngineSupervisor` for those of this machine. Knows nothing of
processes.
"""

import msgspec
import zmq

from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EnginesReady, EngineStalled
from tokenmill_engine.ipc.ids import LAUNCHER_IDENTITY
from tokenmill_engine.ipc.sockets import connect_dealer
from tokenmill_engine.messages import ClientGone, EngineReady

ProcessUpdate = EngineReady | EngineLost | EngineStalled | EngineRecovered
"""An engine core serves from now on, is gone, gets nothing done, or does again."""
EngineUpdate = ProcessUpdate | EngineDraining
"""Also: it takes nothing new, since its launcher was told to stop."""


class EngineTable:
    """The latest state of every engine core. One without any is starting for the first time."""

    def __init__(self, num_engines: int) -> None:
        self._num_engines = num_engines
        self._states: dict[int, EngineReady | EngineLost] = {}
        self._stalled: dict[int, EngineStalled] = {}
        self._draining: dict[int, EngineDraining] = {}
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._inputs: dict[int, zmq.Socket[bytes]] = {}

    def apply(self, update: EngineUpdate) -> None:
        """Takes note of an update."""
        self._stalled.pop(update.engine, None)
        match update:
            case EngineStalled():
                self._stalled[update.engine] = update
            case EngineDraining():
                self._draining[update.engine] = update
            case EngineReady() | EngineLost():
                self._states[update.engine] = update
                self._draining.pop(update.engine, None)
                socket = self._inputs.pop(update.engine, None)
                if socket is not None:
                    socket.close()

    @property
    def ready(self) -> list[EngineReady]:
        """The engine cores that serve, or at least finish what they have, in the order of their ranks."""
        return [state for _, state in sorted(self._states.items()) if isinstance(state, EngineReady)]

    @property
    def lost(self) -> list[EngineLost]:
        """Those that are gone, for now or for good, in the order of their ranks."""
        return [state for _, state in sorted(self._states.items()) if isinstance(state, EngineLost)]

    @property
    def introduction(self) -> EnginesReady:
        """What an API server that knows of no engine core is told."""
        in_rotation = [ready for ready in self.ready if ready.engine not in self._draining]
        stalled = [stalled for stalled in self._stalled.values() if stalled.engine not in self._draining]
        return EnginesReady(in_rotation, self.lost, stalled, list(self._draining.values()))

    @property
    def is_settled(self) -> bool:
        """Whether some serve and no other is still to come."""
        return bool(self.ready) and len(self.ready) + self._num_gone == self._num_engines

    @property
    def is_hopeless(self) -> bool:
        """Whether every rank is gone for good."""
        return self._num_gone == self._num_engines

    @property
    def _num_gone(self) -> int:
        return sum(lost.is_final for lost in self.lost)

    def client_gone(self, client: int, incarnation: int) -> None:
        """Tells every engine core that this incarnation of API server `client` died, so that its requests end."""
        if self._zmq is None:
            self._zmq = zmq.Context()
        frame = msgspec.msgpack.encode(ClientGone(client, incarnation))
        for ready in self.ready:
            if ready.engine not in self._inputs:
                self._inputs[ready.engine] = connect_dealer(
                    self._zmq, ready.endpoints.input, LAUNCHER_IDENTITY, ready.endpoints.key
                )
            self._inputs[ready.engine].send(frame)

    def close(self) -> None:
        """Lets go of the engine cores. May be called twice."""
        if self._zmq is not None:
            self._zmq.destroy(linger=0)
            self._zmq = None
            self._inputs.clear()
