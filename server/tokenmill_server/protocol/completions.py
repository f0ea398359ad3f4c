"""The body of POST /v1/completions."""

from typing import Any

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.protocol.fields import GenerationFields, Int

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
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise InvalidRequestError("prompt must be a string, or a non-empty list of strings or token ids", "prompt")
        if _all_integers(prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequestError(f"at most {MAX_PROMPTS} prompts are allowed, got {len(prompt)}", "prompt")
        if all(isinstance(entry, str) for entry in prompt) or all(
            isinstance(entry, list) and _all_integers(entry) for entry in prompt
        ):
            return prompt
        raise InvalidRequestError("prompt must hold only strings, only token ids, or only lists of token ids", "prompt")

    def token_limit(self) -> int:
        """`max_tokens`; 0 asks for the prompt alone."""
        limit = _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo:
            raise InvalidRequestError("max_tokens must be at least 1 (0 is only for echo)", "max_tokens")
        return limit


def _all_integers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}
