"""Collects a whole generation, for answers that are not streamed."""

import asyncio
from collections.abc import Sequence

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.processing.generation import CompletionOutput, RequestOutput, TokenLogprob
from tokenmill_server.processing.output_processor import Choice, Generation
from tokenmill_server.processing.timings import timings_of


class Collector:
    """An `OutputListener` whose `done` resolves when every choice has finished, or raises what went wrong."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parts: dict[int, _Parts] = {}

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        parts = self._parts.get(choice.index)
        if parts is None:
            parts = self._parts[choice.index] = _Parts()
        if text:
            parts.texts.append(text)
        parts.token_ids.extend(token_ids)
        if logprobs is not None:
            parts.logprobs.extend(logprobs)
        if choice.generation.num_open == 0 and not self.done.done():
            self.done.set_result(None)

    def on_error(self, error: TokenmillError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def failure(self) -> BaseException | None:
        """What went wrong, if anything has."""
        return self.done.exception() if self.done.done() else None

    def leave(self) -> None:
        """Nobody waits: what went wrong is no fault that was overlooked."""
        if not self.done.cancel() and not self.done.cancelled():
            self.done.exception()

    def result(self, generation: Generation) -> RequestOutput:
        """The output, once `done`."""
        request = generation.request
        outputs = []
        for choice in generation.choices:
            parts = self._parts.get(choice.index) or _Parts()
            outputs.append(
                CompletionOutput(
                    index=choice.index,
                    text="".join(parts.texts),
                    token_ids=parts.token_ids,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                    logprobs=parts.logprobs if request.sampling.logprobs is not None else None,
                )
            )
        return RequestOutput(
            label=request.label,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=outputs,
            num_cached_tokens=generation.num_cached_tokens,
            prompt_logprobs=generation.prompt_logprobs(),
            timings=timings_of(generation),
            vector=generation.vector,
        )


async def all_done(collectors: Sequence[Collector]) -> None:
    """Waits for all of them, or for the first that fails, which is raised."""
    if len(collectors) == 1:  # nearly always, and a wait for several costs a request ten times as much
        await collectors[0].done
        return
    await asyncio.wait([collector.done for collector in collectors], return_when=asyncio.FIRST_EXCEPTION)
    for collector in collectors:
        failure = collector.failure()
        if failure is not None:
            raise failure


class _Parts:
    """What has come of one choice."""

    __slots__ = ("logprobs", "texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
