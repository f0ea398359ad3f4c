"""Sends requests again whose media an engine core turned out to lack: it is another one than before, or has let go of
them. The client notices nothing but the time that takes."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tokenmill_engine.errors import EngineError, TokenmillError
from tokenmill_engine.messages import MediaItem, MediaMissing
from tokenmill_server.processing.output_processor import Choice, Generation

logger = logging.getLogger(__name__)

Send = Callable[[Generation, Sequence[Choice], tuple[MediaItem, ...]], None]
"""Sends choices of a generation, with all tensors of its media. Raises EngineDeadError."""


class MediaResender:
    """Of one `TextGenerator`."""

    def __init__(
        self, open_choices: Mapping[int, Choice], send: Send, fail: Callable[[Generation, TokenmillError], None]
    ) -> None:
        """`open_choices` by request id: what is not there any more is not sent again."""
        self._open = open_choices
        self._send = send
        self._fail = fail
        self._tasks: dict[Generation, set[asyncio.Task[None]]] = {}

    def missing(self, message: MediaMissing) -> None:
        """An engine core says so."""
        wanted: dict[Generation, list[Choice]] = {}
        for request_id in message.request_ids:
            choice = self._open.get(request_id)
            if choice is not None:  # else it was aborted meanwhile
                wanted.setdefault(choice.generation, []).append(choice)
        for generation, choices in wanted.items():
            task = asyncio.get_running_loop().create_task(self._resend(generation, choices))
            self._tasks.setdefault(generation, set()).add(task)
            task.add_done_callback(partial(self._forget, generation))

    def give_up(self, generation: Generation) -> None:
        """The generation has ended."""
        for task in self._tasks.pop(generation, ()):
            if task is not asyncio.current_task():
                task.cancel()

    async def _resend(self, generation: Generation, choices: Sequence[Choice]) -> None:
        supply = generation.request.media_supply
        try:
            if supply is None:
                raise EngineError("the engine lacks media that nobody can send again")
            media = await supply.restored()
            left = [choice for choice in choices if choice.request_id in self._open]
            if left:
                self._send(generation, left, media)
        except TokenmillError as error:
            self._fail(generation, error)
        except Exception:  # a fault of ours: the client must not wait for ever
            logger.exception("%s: cannot send its media again", generation.request.label)
            self._fail(generation, EngineError("internal error while sending media again"))

    def _forget(self, generation: Generation, task: "asyncio.Task[None]") -> None:
        tasks = self._tasks.get(generation)
        if tasks is not None:
            tasks.discard(task)
            if not tasks:
                del self._tasks[generation]
