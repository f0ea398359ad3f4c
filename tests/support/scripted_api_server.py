"""A child that speaks an API server's part of the launcher's protocol. CHILD_API says how it behaves: `serve`, `crash`
(exits with status 4 once engines are ready), `fail` (exits with status 5 at once), `busy` (drains until its time is
over, then cuts off three requests), `stubborn` (never drains, nor ever has an engine core that has), `patient` (drains
when it is told a second time)."""

import os
import sys
import time

from tests.support.scripted_child import begin, note
from tokenmill_engine.ipc.control import (
    Drain,
    Drained,
    EngineDrained,
    EngineDraining,
    EngineLost,
    EnginesReady,
    Listening,
    Ping,
    Pulse,
    Serving,
    ToApiServer,
)
from tokenmill_server.control import ApiServerStart


def main() -> None:
    channel = begin("scripted API server", ApiServerStart | ToApiServer)
    start: ApiServerStart = channel.receive()
    behaviour = os.environ["CHILD_API"]
    if behaviour == "fail":
        sys.exit(5)
    os.fstat(start.listen_fd)
    name = f"api {start.client}.{start.incarnation}"
    note(f"{name} pid {os.getpid()}")
    channel.send(Listening())
    while True:
        message = channel.receive()
        if isinstance(message, Ping):
            channel.send(Pulse())
            continue
        line = f"{name} hears {type(message).__name__}"
        if isinstance(message, EnginesReady):
            line += f": {len(message.engines)} there, {len(message.lost)} lost"
            line += f", {len(message.draining)} draining" if message.draining else ""
        note(line)
        match message:
            case EnginesReady() if behaviour == "crash":
                sys.exit(4)
            case EnginesReady():
                channel.send(Serving())
            case EngineLost(message=reason, restarts=restarts):
                note(f"{reason} (restarts: {restarts})")
            case EngineDraining(engine=engine, incarnation=incarnation) if behaviour != "stubborn":
                channel.send(EngineDrained(engine, incarnation))
            case Drain() if behaviour == "patient":
                behaviour = "serve"
            case Drain(timeout_s=timeout_s) if behaviour != "stubborn":
                time.sleep(timeout_s if behaviour == "busy" else 0)
                channel.send(Drained(3 if behaviour == "busy" else 0))
                sys.exit(0)


if __name__ == "__main__":
    main()
