"""Two generations for tests of what a child owes its parent. Started without arguments, or with a mode, it is the
parent: it spawns itself once, prints the child's pid when that is set up, and sleeps. MODE says how the child lives:

    idle      waits in Python, and answers what its parent tells it
    deaf      ignores END_SIGNAL and is busy; the kernel's signal is that one, so only the channel's end can end it
    unwatched does not read its channel; only the kernel's signal can end it
    fails     on what its parent tells it
"""

import argparse
import signal
import time

from tokenmill_engine.ipc.channel import ControlChannel
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import Drained, EngineControl, Listening, Ping
from tokenmill_engine.ipc.lifecycle import become_child, watch_parent
from tokenmill_engine.ipc.signals import END_SIGNAL

Child = ChildProcess[Listening | Drained]


def be_parent(mode: str, run_dir: str) -> None:
    child: Child = spawn_child(
        "tests.support.orphans", Listening | Drained, args=["--mode", mode, "--run-dir", run_dir]
    )
    child.channel.receive()
    print(child.process.pid, flush=True)  # noqa: T201
    if mode == "fails":
        child.channel.send(Ping())
    time.sleep(600)


def fail(message: object) -> None:
    raise ValueError(f"{message} is not understood")


def be_child(options: argparse.Namespace) -> None:
    death_signal = END_SIGNAL if options.mode == "deaf" else signal.SIGKILL
    become_child("test orphan", options.parent_pid, death_signal)
    channel: ControlChannel[object] = ControlChannel.from_fd(options.control_fd, EngineControl)
    if options.mode == "deaf":
        signal.signal(END_SIGNAL, signal.SIG_IGN)
    if options.mode != "unwatched":
        answer = fail if options.mode == "fails" else lambda _message: channel.send(Drained())
        watch_parent(channel, answer, options.run_dir)
    channel.send(Listening())
    end = time.monotonic() + 600
    while time.monotonic() < end:
        if options.mode != "deaf":
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--parent-pid", type=int)
    options = parser.parse_args()
    if options.control_fd is None:
        be_parent(options.mode, options.run_dir)
    else:
        be_child(options)


if __name__ == "__main__":
    main()
