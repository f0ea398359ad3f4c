"""The library as a guest in the process: its threads, and callers that share it."""

import threading
import time

import torch

from tests.support.server import wait_for
from tokenmill_kernels.cpu import ops as cpu
from tokenmill_kernels.cpu.library import set_num_threads
from tokenmill_kernels.cpu.packed import pack


def test_idle_threads_sleep() -> None:
    """Processor time of the whole process while nothing is asked of the library, soon after it was."""
    set_num_threads(4)
    cpu.linear(torch.randn(64, 512), pack(torch.randn(512, 512)))

    def cpu_s_meanwhile() -> float:
        before = time.process_time()
        time.sleep(0.4)
        return time.process_time() - before

    wait_for(lambda: cpu_s_meanwhile() < 0.05, 30, "sleeping threads", poll_s=0.0)


def test_callers_take_turns() -> None:
    x, weight = torch.randn(33, 256), torch.randn(300, 256)
    packed = pack(weight)
    expected = cpu.linear(x, packed)
    wrong: list[int] = []

    def call() -> None:
        wrong.extend(index for index in range(200) if not torch.equal(cpu.linear(x, packed), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
