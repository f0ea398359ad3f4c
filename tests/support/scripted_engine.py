"""A child that speaks an engine core's part of the launcher's protocol. CHILD_ENGINE says how it behaves: `ready`,
`refuse` (says why it cannot start), `crash` (exits with status 3 instead of starting), `die` (with status 4, as soon as
it has started), `stall` (says that it has work, and finishes no step). `start,restart` is how the first incarnation and
how all others behave."""

import os
import sys

import msgspec
import zmq

from tests.support.scripted_child import begin, note
from tokenmill_engine.ipc.control import EngineControl, EngineStart, StartFailed
from tokenmill_engine.ipc.heartbeat import Heartbeat
from tokenmill_engine.ipc.lifecycle import watch_parent
from tokenmill_engine.ipc.sockets import bind_router
from tokenmill_engine.messages import ClientGone, EngineReady


def main() -> None:
    channel = begin("scripted engine", EngineControl)
    note(f"engine process pid {os.getpid()}")
    start: EngineStart = channel.receive()
    behaviours = os.environ["CHILD_ENGINE"].split(",")
    behaviour = behaviours[min(start.incarnation, len(behaviours) - 1)]
    if behaviour == "refuse":
        channel.send(StartFailed("not enough of everything; use --less"))
        sys.exit(1)
    if behaviour == "crash":
        sys.exit(3)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_router(context, start.bind.input)
    heartbeat = Heartbeat(channel)
    heartbeat.has_work = lambda: behaviour == "stall"
    watch_parent(channel, heartbeat.answer, start.run_dir)
    note(f"engine {start.engine} pid {os.getpid()}")
    channel.send(EngineReady(start.engine, start.incarnation, start.bind, 128, 8, 16, 128, "none", {"load": 0.1}))
    if behaviour == "die":
        sys.exit(4)
    while True:
        _, frame = socket.recv_multipart()
        gone = msgspec.msgpack.decode(frame, type=ClientGone)
        note(f"engine {start.engine} hears that client {gone.client}.{gone.incarnation} is gone")


if __name__ == "__main__":
    main()
