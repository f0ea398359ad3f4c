"""One line in the log for each request that was answered (`--enable-log-requests`). Of what clients write its id gets
into it, which is printable, and texts where the server's owner wants that (`Quotes`)."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenmill_server.config import ServerConfig
from tokenmill_server.processing.generation import RequestOutput
from tokenmill_server.processing.output_processor import Generation

logger = logging.getLogger(__name__)

ANSWER = "answer_in_log"
"""Key of the scope's state: what the line says of the answer."""


def log_request(request_id: str, method: str, route: str, status: int, duration_s: float, answer: str | None) -> None:
    """`route`: the template of its path; `answer`: what was generated, if anything."""
    details = "" if answer is None else f"; {answer}"
    logger.info("%s: %s %s: status %d after %.0f ms%s", request_id, method, route, status, duration_s * 1000, details)


@dataclass(slots=True, frozen=True)
class Quotes:
    """What lines tell of texts."""

    max_prompt_chars: int | None
    """None: nothing of prompts."""
    outputs: bool

    def __call__(self, prompts: Iterable[tuple[str | None, Sequence[int]]], texts: Iterable[str]) -> str:
        """The end of a line: `prompts` as text and token ids, and what was generated."""
        most = self.max_prompt_chars
        parts = []
        if most is not None:
            parts += [f"prompt {_quoted(str([*ids[:most]]) if text is None else text, most)}" for text, ids in prompts]
        if self.outputs:
            parts += [f"output {_quoted(text, most)}" for text in texts]
        return "".join(f"; {part}" for part in parts)


def quotes_of(config: ServerConfig) -> Quotes:
    return Quotes(config.max_log_len, config.log_outputs)


def answer_of(outputs: Sequence[RequestOutput], quotes: Quotes) -> str:
    """Of answers that are complete."""
    line = _answer(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
        sum(len(choice.token_ids) for output in outputs for choice in output.outputs),
        (choice.finish_reason for output in outputs for choice in output.outputs),
    )
    texts = (choice.text for output in outputs for choice in output.outputs)
    return line + quotes(((output.prompt, output.prompt_token_ids) for output in outputs), texts)


def answer_so_far(generations: Sequence[Generation], quotes: Quotes) -> str:
    """Of streams, which may have been left before their end."""
    line = _answer(
        sum(len(generation.request.prompt_token_ids) for generation in generations),
        sum(generation.num_cached_tokens for generation in generations),
        sum(generation.num_tokens for generation in generations),
        (choice.finish_reason for generation in generations for choice in generation.choices),
    )
    requests = (generation.request for generation in generations)
    texts = ("".join(choice.said or ()) for generation in generations for choice in generation.choices)
    return line + quotes(((request.prompt, request.prompt_token_ids) for request in requests), texts)


def _quoted(text: str, most: int | None) -> str:
    """On one line, whatever is in it."""
    return repr(text) if most is None or len(text) <= most else f"{text[:most]!r}..."


def _answer(num_prompt: int, num_cached: int, num_generated: int, reasons: Iterable[str | None]) -> str:
    ends = ", ".join(sorted({"not finished" if reason is None else str(reason) for reason in reasons}))
    return f"{num_prompt} prompt tokens ({num_cached} cached), {num_generated} generated ({ends})"
