"""A program of its own that decodes and prepares large images for an API server, one after another: whatever that takes
of the interpreter's lock, and whatever a file does to its decoder, the server's streams go on.

Started by `image_processes` with the number of a socket (`image_channel`), never imported by the server. Ends when the
other end of the socket is gone.
"""

import ctypes
import math
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress

from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.decode import decode
from tokenmill_server.multimodal.errors import MediaError
from tokenmill_server.multimodal.image_channel import (
    Answer,
    Channel,
    Counted,
    Failed,
    Job,
    Keyed,
    Packed,
    Ready,
    Setup,
    Tensor,
)
from tokenmill_server.multimodal.image_item import make_item
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.own_process import return_large_blocks
from tokenmill_server.multimodal.processor import ImageProcessor

_PR_SET_PDEATHSIG = 1
_NICENESS = 10
"""Streams go first where cores are few: an event loop that wakes up gets its core sooner."""


class _UnwantedError(Exception):
    """Nobody wants this image any more."""


def serve(channel: Channel) -> None:
    """Prepares what comes. Raises ConnectionError at the end."""
    setup = channel.receive(Setup)
    processor = ImageProcessor(setup.media, setup.options)
    channel.send(Ready())
    num_own_bytes = _address_space()
    while True:
        job = channel.receive(Job)
        _limit(resource.RLIMIT_AS, num_own_bytes + job.memory_bytes)
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + job.cpu_s)
        try:
            _prepare(channel, job, processor)
        except _UnwantedError:
            continue
        except MediaError as error:
            channel.send(Failed("media", str(error)))
        except MemoryError:
            _limit(resource.RLIMIT_AS, sys.maxsize)  # saying so takes some, too
            channel.send(Failed("memory", ""))
            return
        except ConnectionError:
            raise
        except Exception as error:
            channel.send(Failed("program", repr(error)))
            return


def _prepare(channel: Channel, job: Job, processor: ImageProcessor) -> None:
    def ask(message: Counted | Keyed) -> None:
        channel.send(message)
        if not channel.receive(Answer).goes_on:
            raise _UnwantedError

    def find(key: bytes) -> PreparedItem | None:
        ask(Keyed(key))
        return None

    picture = decode(bytes(channel.read(job.num_bytes)), job.max_pixels)
    item = make_item(processor, picture, job.wanted, Asking(lambda num_tokens: ask(Counted(num_tokens)), find))
    views = [memoryview(each.data) for each in item.tensors.values()]
    tensors = [
        Tensor(name, each.dtype, each.shape, view.nbytes)
        for (name, each), view in zip(item.tensors.items(), views, strict=True)
    ]
    channel.send(Packed(item.grid, tensors), *views)


def _address_space() -> int:
    """Bytes that this process has of it now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(kind: int, wanted: int) -> None:
    """No more than what holds for all of this process's life."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def confine() -> None:
    """This process ends with its parent (with the thread that started it, which lives as long) and not before: signals
    that a whole group of processes gets are the parent's affair. It writes no files, and leaves cores to others."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))


def main() -> None:
    confine()
    return_large_blocks()
    with socket.socket(fileno=int(sys.argv[1])) as end, suppress(ConnectionError):
        serve(Channel(end))


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing is left to put in order, and the server may be waiting
