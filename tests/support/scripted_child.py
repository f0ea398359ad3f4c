"""What the launcher's scripted children share. CHILD_LOG names a file that takes one line per event."""

import argparse
import os
from pathlib import Path
from typing import Any

from tokenmill_engine.ipc.channel import ControlChannel
from tokenmill_engine.ipc.lifecycle import become_child


def begin(title: str, message_type: Any) -> ControlChannel[Any]:
    """Starts as every child does; returns the channel to the launcher."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int)
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--run-dir")
    parser.add_argument("--device")
    parser.add_argument("--workers")
    options = parser.parse_args()
    become_child(title, options.parent_pid)
    return ControlChannel.from_fd(options.control_fd, message_type)


def note(line: str) -> None:
    """Adds a line to the log."""
    with Path(os.environ["CHILD_LOG"]).open("a", encoding="utf-8") as stream:
        stream.write(line + "\n")
