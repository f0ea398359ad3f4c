"""Sends requests again whose media an engine core turned out to lack: it is another one than before, or has let go of
them. And sends those late whose media have to be read first. The client notices nothing but the time that takes."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
        self._resends: dict[Generation, _Resend] = {}
        """Those that wait for tensors."""

    def missing(self, message: MediaMissing) -> None:
        """An engine core says so."""
        for request_id in message.request_ids:
            choice = self._open.get(request_id)
            if choice is None:  # it was aborted meanwhile
                continue
            resend = self._resends.get(choice.generation)
            if resend is None:
                self._begin(choice.generation, [choice])
            else:
                resend.choices.append(choice)

    def send_later(self, generation: Generation) -> None:
        """Send all choices of a generation, none of which was sent before, once their media are there."""
        self._begin(generation, list(generation.choices))

    def _begin(self, generation: Generation, choices: list[Choice]) -> None:
        resend = self._resends[generation] = _Resend(choices)
        resend.task = asyncio.get_running_loop().create_task(self._resend(generation, resend))

    def give_up(self, generation: Generation) -> None:
        """The generation has ended."""
        resend = self._resends.pop(generation, None)
        if resend is not None and resend.task is not None:
            resend.task.cancel()

    async def _resend(self, generation: Generation, resend: "_Resend") -> None:
        """Choices that turn out to lack media while these are prepared go with the others: tensors travel once."""
        supply = generation.request.media_supply
        error: TokenmillError
        try:
            if supply is None:
                raise EngineError("the engine lacks media that nobody can send again")
            media = await supply.restored()
            del self._resends[generation]
            self._send(generation, resend.choices, media)
            return
        except TokenmillError as failure:
            error = failure
        except Exception:  # a fault of ours: the client must not wait for ever
            logger.exception("%s: cannot send its media again", generation.request.label)
            error = EngineError("internal error while sending media again")
        self._resends.pop(generation, None)
        self._fail(generation, error)


@dataclass(slots=True)
class _Resend:
    """Choices of one generation, and who prepares their media. All of them are open: they end together."""

    choices: list[Choice]
    task: asyncio.Task[None] | None = None
