"""How long a client waits for a whole answer (the header `X-Request-Timeout-Ms`), and what happens then."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokenmill_engine.errors import DeadlineError, OverloadedError, TokenmillError
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.output_processor import Generation

T = TypeVar("T")

TIMEOUT_HEADER = "X-Request-Timeout-Ms"


_NOT_BEGUN = f"the time of {TIMEOUT_HEADER} was over before the answer began"


def is_over(request: GenerationRequest) -> bool:
    """Whether the time for the answer is."""
    return request.deadline is not None and request.deadline <= time.monotonic()


def check_deadline(request: GenerationRequest) -> None:
    """Raises OverloadedError if the time for the answer is over already."""
    if is_over(request):
        raise OverloadedError(_NOT_BEGUN)


async def in_time(deadline: float | None, work: Awaitable[T]) -> T:
    """What `work` returns, which the answer cannot begin without. Raises OverloadedError at the deadline, if there is
    one, and cancels the work."""
    if deadline is None:
        return await work
    try:
        async with asyncio.timeout(deadline - time.monotonic()) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise OverloadedError(_NOT_BEGUN) from error


def set_deadline(generation: Generation, fail: Callable[[Generation, TokenmillError], None]) -> None:
    """`fail` will be called at the generation's deadline, if it has one, unless its timer is cancelled before."""
    if generation.request.deadline is not None:
        left_s = generation.request.deadline - time.monotonic()
        loop = asyncio.get_running_loop()
        generation.deadline_timer = loop.call_later(left_s, lambda: fail(generation, _too_late(generation)))


def _too_late(generation: Generation) -> TokenmillError:
    """What has no token yet has cost little, and may be tried again."""
    if generation.first_token_time is None:
        return OverloadedError(_NOT_BEGUN)
    return DeadlineError(f"the time of {TIMEOUT_HEADER} was over before the answer was complete")
