"""A child that speaks an engine core's part of the launcher's protocol. CHILD_ENGINE says how it behaves: `ready`,
`refuse` (says why it cannot start), `crash` (exits with status 3 instead of starting), `kill` (is killed instead),
`die` (with status 4, as soon as it has started), `late` (is not ready before another one was restarted), `stall` (says
that it has work, and finishes no step), `hiccup` (the same until an API server has heard of it). `first,later` is how
the first incarnation and how all others behave, `behaviour:1` is that of engine 1 alone."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec
import zmq

from tests.support.scripted_child import begin, note
from tokenmill_engine.ipc.control import EngineControl, EngineStart, StartFailed
from tokenmill_engine.ipc.heartbeat import Heartbeat
from tokenmill_engine.ipc.lifecycle import watch_parent
from tokenmill_engine.ipc.sockets import bind_router, bound_endpoint
from tokenmill_engine.messages import ClientGone, EngineReady


def wait_for_note(text: str) -> None:
    """Until somebody has noted a line with `text` in it."""
    while text not in Path(os.environ["CHILD_LOG"]).read_text():
        time.sleep(0.05)


def behaviour_of(start: EngineStart) -> str:
    behaviours = os.environ["CHILD_ENGINE"].split(",")
    behaviour, _, engine = behaviours[min(start.incarnation, len(behaviours) - 1)].partition(":")
    return behaviour if engine in ("", str(start.engine)) else "ready"


def get_on(heartbeat: Heartbeat) -> None:
    """Counts turns again once the stall was noticed."""
    wait_for_note("hears EngineStalled")
    while True:
        heartbeat.num_turns += 1
        time.sleep(0.05)


def main() -> None:
    channel = begin("scripted engine", EngineControl)
    note(f"engine process pid {os.getpid()}")
    start: EngineStart = channel.receive()
    note(f"engine {start.engine}.{start.incarnation} hears EngineStart")
    behaviour = behaviour_of(start)
    if behaviour == "refuse":
        channel.send(StartFailed("not enough of everything; use --less"))
        sys.exit(1)
    if behaviour == "crash":
        sys.exit(3)
    if behaviour == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = bind_router(context, start.bind.input, secret_key=start.bind.key)
    bound = msgspec.structs.replace(start.bind, input=bound_endpoint(socket))
    heartbeat = Heartbeat(channel)
    heartbeat.has_work = lambda: behaviour in ("stall", "hiccup")
    watch_parent(channel, heartbeat.answer, start.run_dir)
    if behaviour == "late":
        wait_for_note(".1 pid")
    if behaviour == "hiccup":
        threading.Thread(target=get_on, args=(heartbeat,), daemon=True).start()
    channel.send(EngineReady(start.engine, start.incarnation, bound, 128, 8, 16, 128, "none", {"load": 0.1}))
    name = f"engine {start.engine}.{start.incarnation}"
    note(f"{name} pid {os.getpid()}")
    if behaviour == "die":
        sys.exit(4)
    while True:
        _, frame = socket.recv_multipart()
        gone = msgspec.msgpack.decode(frame, type=ClientGone)
        note(f"{name} hears that client {gone.client}.{gone.incarnation} is gone")


if __name__ == "__main__":
    main()
