"""Runs the processes of a group, each of which writes lines of JSON, and says which of them stopped where."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from tests.support.peer_member import HANG_S, scenario

ROOT = Path(__file__).parents[2]


class PeerProcesses:
    """`python -m MODULE RANK SIZE STORE_PATH *ARGUMENTS` for each rank."""

    def __init__(self, module: str, size: int, folder: Path, *arguments: str) -> None:
        self._lines: Queue[tuple[int, str | None]] = Queue()
        self._errors = [(folder / f"stderr-{rank}").open("w+") for rank in range(size)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(size), str(folder / "store"), *arguments],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors[rank],
                text=True,
            )
            for rank in range(size)
        ]
        self._readers = [threading.Thread(target=self._read, args=(rank,)) for rank in range(size)]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: int) -> None:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            self._lines.put((rank, line))
        self._lines.put((rank, None))

    def run(self, on_line: Callable[[int, Any], None], deadline_s: float = HANG_S + 20) -> None:
        """Every line goes to `on_line` with its rank, until all processes have ended. Raises AssertionError if one
        fails, or if none writes anything for `deadline_s`."""
        left = set(range(len(self.processes)))
        last: dict[int, object] = {}
        while left:
            try:
                rank, line = self._lines.get(timeout=deadline_s)
            except Empty:
                raise AssertionError(f"nothing for {deadline_s:g} s: {self._stand(last)}") from None
            if line is not None:
                last[rank] = json.loads(line)
                on_line(rank, last[rank])
                continue
            left.remove(rank)
            status = self.processes[rank].wait()
            assert status == 0, f"member {rank} ended with {status}: {self._stand(last)}"

    def _stand(self, last: dict[int, object]) -> str:
        """What each member said last, and what it wrote to stderr."""
        lines = []
        for rank, file in enumerate(self._errors):
            file.flush()
            file.seek(0)
            lines.append(f"\n--- member {rank} said {last.get(rank)}\n{file.read()[-4000:]}")
        return "".join(lines)

    def tell(self, rank: int) -> None:
        """A line to a member."""
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write("\n")
        stdin.flush()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        for process, file in zip(self.processes, self._errors, strict=True):
            for stream in (process.stdin, process.stdout, file):
                if stream is not None:
                    stream.close()


def run_scenario(size: int, folder: Path, device: str, name: str, *options: str) -> None:
    """The calls of a scenario of `peer_member`. Raises AssertionError if one is wrong, or if members have different
    results."""
    calls = list(scenario(name, size))
    digests: list[list[str]] = [[] for _ in range(size)]
    begun: Counter[int] = Counter()

    def on_line(rank: int, said: dict[str, object]) -> None:
        if "begins" in said:
            index = len(digests[rank])
            begun[index] += 1
            # The one that is held back goes on when all others wait for it.
            held = calls[index].held
            if held is not None and begun[index] == size:
                processes.tell(held)
        elif "digest" in said:
            digests[rank].append(str(said["digest"]))

    with closing(PeerProcesses("tests.support.peer_member", size, folder, device, name, *options)) as processes:
        processes.run(on_line)
    assert [len(of_member) for of_member in digests] == [len(calls)] * size
    for call, of_members in zip(calls, zip(*digests, strict=True), strict=True):
        assert len(set(of_members)) == 1, f"members have different bits: {call}"
