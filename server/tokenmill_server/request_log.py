"""One line in the log for each request that was answered (`--enable-log-requests`). Nothing of what clients write gets
into it but the request's id, which is printable."""

import logging
from collections.abc import Iterable, Sequence

from tokenmill_server.processing.generation import RequestOutput
from tokenmill_server.processing.output_processor import Generation

logger = logging.getLogger(__name__)

ANSWER = "answer_in_log"
"""Key of the scope's state: what the line says of the answer."""


def log_request(request_id: str, method: str, route: str, status: int, duration_s: float, answer: str | None) -> None:
    """`route`: the template of its path; `answer`: what was generated, if anything."""
    details = "" if answer is None else f"; {answer}"
    logger.info("%s: %s %s: status %d after %.0f ms%s", request_id, method, route, status, duration_s * 1000, details)


def answer_of(outputs: Sequence[RequestOutput]) -> str:
    """Of answers that are complete."""
    return _answer(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
        (choice.finish_reason for output in outputs for choice in output.outputs),
    )


def answer_so_far(generations: Sequence[Generation]) -> str:
    """Of streams, which may have been left before their end."""
    return _answer(
        sum(len(generation.request.prompt_token_ids) for generation in generations),
        sum(generation.num_cached_tokens for generation in generations),
        sum(generation.num_tokens for generation in generations),
        (choice.finish_reason for generation in generations for choice in generation.choices),
    )


def _answer(num_prompt: int, num_cached: int, num_generated: int, reasons: Iterable[str | None]) -> str:
    ends = ", ".join(sorted({"not finished" if reason is None else str(reason) for reason in reasons}))
    return f"{num_prompt} prompt tokens ({num_cached} cached), {num_generated} generated ({ends})"
