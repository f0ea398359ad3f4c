"""The body of POST /v1/completions."""

from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.protocol.fields import GenerationFields, Int
from tokenmill_server.protocol.prompts import read_prompts

MAX_PROMPTS = 1024
_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields):
    """Fields of a text completion beside the common ones."""

    prompt: Any = None
    """str, list of str, list of token ids, or list of lists of token ids."""
    logprobs: Int | None = None
    suffix: str | None = None
    """What comes after the text that is to be written."""

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts. Raises InvalidRequestError for anything else than the four forms."""
        return read_prompts(self.prompt, "prompt", MAX_PROMPTS)

    def token_limit(self) -> int:
        """`max_tokens`; 0 asks for the prompt alone."""
        limit = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1 (0 is only for echo)", "max_tokens")
        return limit
