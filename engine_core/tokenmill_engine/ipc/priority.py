"""Work that gives way: where processors are few, steps go first."""

import os
import sys
import threading
from typing import Final

_NICENESS: Final = 10


def give_way() -> None:
    """Lowers the priority of the calling thread for good, and of the processes that it starts from then on. Only Linux
    has one for each thread; elsewhere nothing happens."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
