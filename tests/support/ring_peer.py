"""A reader of a ring in a process of its own: `python -m tests.support.ring_peer MODE MEMORY WAKE SPACE INDEX`, with
the descriptors inherited. It says `reading` when it begins. MODE says what it does with messages until an empty one:

    digest  print how many they were and the SHA-256 of all
    echo    write each into a second ring, whose MEMORY WAKE SPACE follow
    still   read none
"""

import hashlib
import signal
import sys

from tokenmill_engine.ipc.shared_ring import RingReader, RingWriter


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    mode = sys.argv[1]
    memory, wake, space, index, *echo = map(int, sys.argv[2:])
    reader = RingReader(memory, wake, space, index)
    say("reading")
    if mode == "still":
        signal.pause()
    writer = RingWriter(echo[0], (echo[1],), echo[2]) if mode == "echo" else None
    count, digest = 0, hashlib.sha256()
    while message := reader.receive():
        count += 1
        digest.update(message)
        if writer is not None:
            writer.send(message)
    say(f"{count} {digest.hexdigest()}")


if __name__ == "__main__":
    main()
