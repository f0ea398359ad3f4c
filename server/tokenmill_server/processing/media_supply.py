"""How the media of a request reach an engine core, for those who send requests and know nothing of media."""

from typing import Protocol

from tokenmill_engine.messages import MediaItem


class MediaSupply(Protocol):
    """Where the tensors of one request's media come from. `GenerationRequest.media` has none."""

    def outgoing(self, shares: bool = False) -> tuple[MediaItem, ...] | None:
        """The media as they travel with the first sequence that is sent, now; with tensors where the engine core is not
        believed to have them. All other sequences for the same engine core carry the same without tensors, unless these
        are in shared memory. `shares`: the engine core reads the memory that this process shares. None: tensors have to
        be read from there first, by `restored`. Not called twice."""

    async def restored(self) -> tuple[MediaItem, ...]:
        """The media with all their tensors, for an engine core that lacks some: each once, with the first item that has
        it. May take long.

        Raises RequestError if they cannot be had any more.
        """

    def settle(self) -> None:
        """Every sequence has had an answer: nothing needs to be sent again any more."""

    def end(self) -> None:
        """The request has ended, and with it what it had in shared memory. May be called again."""
