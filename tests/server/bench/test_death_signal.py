"""Programs that a killed process has started."""

import signal
import subprocess
import sys

import psutil
import pytest

from tests.support.processes import wait_for_ends

STARTER = """
import os, signal, sys, time
from pathlib import Path
from tokenmill_server.bench.compare_process import Log, Program, running_process

if {deaf}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
program = Program([sys.executable, "-c", {program!r}], os.environ, signal.Signals({number}))
with running_process(program, Log(Path(os.devnull)), stdout=None):
    time.sleep(600)
"""
ALONE = """
import os, time
print(os.getpid(), flush=True)
time.sleep(600)
"""
WITH_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
try:
    print(os.getpid(), child.pid, flush=True)
    time.sleep(600)
finally:
    child.kill()
"""


@pytest.mark.parametrize(
    ("number", "program", "deaf"),
    [
        (signal.SIGKILL, ALONE, False),
        (signal.SIGINT, WITH_A_CHILD, False),
        (signal.SIGINT, WITH_A_CHILD, True),
    ],
)
def test_they_end_with_it(number: signal.Signals, program: str, deaf: bool) -> None:
    """Also where a shell has made it deaf to Ctrl-C. One that may do so ends its own children."""
    source = STARTER.format(program=program, number=int(number), deaf=deaf)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        started = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        starter.kill()
    assert started
    wait_for_ends(started)


LATE = """
import os
from tokenmill_server.bench.death_signal import die_with_this_process

def status(work):
    pid = os.fork()
    if not pid:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def run():
    set_death_signal()
    return 7

set_death_signal = die_with_this_process()
print(status(run), status(lambda: status(run)))
"""


def test_none_begins_whose_starter_is_gone() -> None:
    """The parent of the second one is another process, as for orphans."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True)
    assert done.stdout == "7 1\n"
