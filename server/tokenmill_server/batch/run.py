"""Sends the lines of a batch, a bounded number at a time, and writes every answer as it comes."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tokenmill_server.batch.journal import Output
from tokenmill_server.batch.lines import Answer, BadLineError, BatchRequest, Key, read_request, unsent
from tokenmill_server.batch.target import Sender, Target


@dataclass(slots=True, frozen=True)
class Totals:
    """What became of a batch."""

    num_lines: int
    num_skipped: int
    """Answered before this run."""


def run(
    lines: Iterable[bytes],
    output: Output,
    server: AbstractContextManager[Target],
    max_concurrency: int,
    on_progress: Callable[[], object],
) -> Totals:
    """Answers every one of `lines` that `output` has no answer for; `on_progress` is called for each line. `server` is
    entered only if there is something to send.

    Raises:
        TokenmillError: the server is gone, or the output cannot be written. What was answered is kept.
    """
    reader = _Reader(output, on_progress)
    requests = reader.requests(lines)
    first = next(requests, None)
    if first is not None:
        with server as target, _Senders(target) as senders:
            for request in itertools.chain([first], requests):
                if senders.num_open == max_concurrency:
                    output.append(senders.next_answer())
                    on_progress()
                senders.put(request)
            while senders.num_open:
                output.append(senders.next_answer())
                on_progress()
    output.put_in_order(reader.order)
    return Totals(len(reader.order), reader.num_skipped)


class _Reader:
    """From lines to requests. Lines that cannot be sent are answered at once."""

    def __init__(self, output: Output, on_progress: Callable[[], object]) -> None:
        self.order: list[Key] = []
        self.num_skipped = 0
        self._output = output
        self._on_progress = on_progress
        self._lines_of: dict[str, int] = {}
        """custom_id -> the number of the line that has it."""

    def requests(self, lines: Iterable[bytes]) -> Iterator[BatchRequest]:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = read_request(line)
                self._claim(request.custom_id, number)
            except BadLineError as problem:
                self._refuse(number, problem)
                continue
            self.order.append(request.custom_id)
            if request.custom_id in self._output:
                self._skip()
            else:
                yield request

    def _claim(self, custom_id: str, number: int) -> None:
        """Raises BadLineError for an id that another line has: it could not be told whose answer one is."""
        first = self._lines_of.setdefault(custom_id, number)
        if first != number:
            raise BadLineError(f"custom_id {custom_id[:200]!r} is that of line {first} already")

    def _refuse(self, number: int, problem: BadLineError) -> None:
        if problem.custom_id is not None:
            try:
                self._claim(problem.custom_id, number)
            except BadLineError as other:
                problem = other
        key: Key = number if problem.custom_id is None else problem.custom_id
        self.order.append(key)
        if key in self._output:
            self._skip()
        else:
            self._output.append(unsent(number, problem))
            self._on_progress()

    def _skip(self) -> None:
        self.num_skipped += 1
        self._on_progress()


class _Senders:
    """Threads that each have one request open. They wait nearly all of the time, and end with the program."""

    def __init__(self, target: Target) -> None:
        self.num_open = 0
        self._target = target
        self._num_threads = 0
        self._stopped = threading.Event()
        self._requests: queue.SimpleQueue[BatchRequest | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer | BaseException] = queue.SimpleQueue()

    def __enter__(self) -> "_Senders":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        for _ in range(self._num_threads):
            self._requests.put(None)

    def put(self, request: BatchRequest) -> None:
        self.num_open += 1
        if self.num_open > self._num_threads:
            self._num_threads += 1
            threading.Thread(target=self._work, name="batch-sender", daemon=True).start()
        self._requests.put(request)

    def next_answer(self) -> Answer:
        """Waits for one. Raises what a thread met."""
        answer = self._answers.get()
        self.num_open -= 1
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _work(self) -> None:
        sender = Sender(self._target, self._stopped)
        while (request := self._requests.get()) is not None and not self._stopped.is_set():
            try:
                self._answers.put(sender.send(request))
            except Exception as error:  # a bug must end the run, not one of its threads
                self._answers.put(error)
        sender.close()
