"""What `LLM` returns: plain objects with the attributes that vLLM's have."""

from dataclasses import dataclass

from tokenmill_server.processing import generation
from tokenmill_server.processing.generation import TokenLogprob
from tokenmill_server.processing.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position. `rank` is 1 for the most likely, and None for those that were not
    generated but named (`logprob_token_ids`)."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    """`stop`, `length` or `repetition`."""
    stop_reason: int | str | None
    """The stop string or the entry of `stop_token_ids` that ended it; None for the model's own end token."""
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """Per token: the sampled one and the most likely ones, or those that `logprob_token_ids` names, by id."""


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt."""

    request_id: str
    prompt: str | None
    """None where the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """Per prompt token; the first has none."""
    finished: bool = True


def public_output(output: generation.RequestOutput, tokenizer: Tokenizer, *, named: bool = False) -> RequestOutput:
    """The output in its public form. `named`: its log-probabilities are of `logprob_token_ids`."""
    prompt_logprobs = output.prompt_logprobs
    return RequestOutput(
        request_id=output.label,
        prompt=output.prompt,
        prompt_token_ids=list(output.prompt_token_ids),
        outputs=[_choice(choice, tokenizer, named) for choice in output.outputs],
        num_cached_tokens=output.num_cached_tokens,
        prompt_logprobs=None
        if prompt_logprobs is None
        else [None if entry is None else _by_id(entry, tokenizer) for entry in prompt_logprobs],
    )


def _choice(choice: generation.CompletionOutput, tokenizer: Tokenizer, named: bool) -> CompletionOutput:
    logprobs = choice.logprobs
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids,
        finish_reason=str(choice.finish_reason),
        stop_reason=choice.stop_reason,
        cumulative_logprob=None if logprobs is None else sum(entry.logprob for entry in logprobs),
        logprobs=None if logprobs is None else [_by_id(entry, tokenizer, named) for entry in logprobs],
    )


def _by_id(entry: TokenLogprob, tokenizer: Tokenizer, named: bool = False) -> dict[int, Logprob]:
    """The token itself first, then the most likely ones in order, or those that are named."""
    result = {entry.token_id: Logprob(entry.logprob, entry.rank, tokenizer.decode([entry.token_id], False))}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        result.setdefault(token_id, Logprob(logprob, None if named else rank, tokenizer.decode([token_id], False)))
    return result
