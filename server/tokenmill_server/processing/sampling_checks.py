"""Ranges of every sampling parameter. The one place where they are decided, for HTTP and for `LLM` alike.

Comparisons are written so that NaN fails them.
"""

from collections.abc import Collection, Iterable

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import RepetitionDetection, SamplingParams
from tokenmill_server.processing.shown import shown

MAX_CHOICES = 1024
"""Of one request, over all of its prompts."""
MAX_STOP_CHARS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROB_TOKENS = 128
MAX_PATTERN_SIZE = 256
"""Of `repetition_detection`: each size is a comparison for every token."""
MAX_BAD_WORDS_CHARS = 8192
"""Of all together: they are tokenized while other requests wait."""

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""What float32 logits survive."""
MAX_PROMPT_LOGPROBS = 3_000_000
"""Values in one HTTP reply; a prompt of 131072 tokens with 20 alternatives each has 2.75 million."""
MAX_STREAMED_PROMPT_LOGPROBS = 50_000
"""In one stream (`echo`), where they are written between the tokens of others."""

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def check_sampling(sampling: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Raises InvalidRequestError naming the first parameter that is out of range. `max_logprobs` -1: no limit."""
    _check_numbers(sampling)
    _check_lengths(sampling)
    _check_repetition(sampling.repetition_detection)
    _check_logprobs(sampling.logprobs, "logprobs", vocab_size, max_logprobs)
    _check_logprobs(sampling.prompt_logprobs, "prompt_logprobs", vocab_size, max_logprobs)
    _check_wanted(sampling, vocab_size)
    _check_token_set(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    _check_token_set(sampling.logit_bias or (), vocab_size, "logit_bias")
    if sampling.allowed_token_ids is not None:
        if not sampling.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", "allowed_token_ids")
        _check_token_set(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    if not sampling.spaces_between_special_tokens:
        raise InvalidRequestError(
            "spaces_between_special_tokens must be true: the text is that of the tokens, with nothing taken out; "
            "use skip_special_tokens to leave special tokens out",
            "spaces_between_special_tokens",
            "unsupported_parameter",
        )


def check_some_token_is_possible(sampling: SamplingParams, vocab_size: int, eos_token_ids: Collection[int]) -> None:
    """Raises InvalidRequestError if everything that is allowed is forbidden too: by `bad_words_token_ids`, or as an
    end before `min_tokens`."""
    forbidden = {word[0] for word in sampling.bad_words_token_ids if len(word) == 1}
    allowed = range(vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    if all(token_id in forbidden for token_id in allowed):
        raise InvalidRequestError("bad_words forbid every token that is allowed", "bad_words")
    if sampling.min_tokens == 0:
        return
    forbidden.update(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        forbidden.update(eos_token_ids)
    if all(token_id in forbidden for token_id in allowed):
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}, but every token that is allowed ends the answer or is forbidden",
            "stop_token_ids" if sampling.allowed_token_ids is None else "allowed_token_ids",
        )


def check_num_prompt_logprobs(
    num_prompt_tokens: int, sampling: SamplingParams, param: str, limit: int = MAX_PROMPT_LOGPROBS
) -> None:
    """Raises InvalidRequestError for more of them than a reply may hold. `num_prompt_tokens`: of all prompts."""
    if sampling.prompt_logprobs is None:
        return
    num_values = num_prompt_tokens * (sampling.prompt_logprobs + 1) * sampling.n
    if num_values > limit:
        raise InvalidRequestError(
            f"{num_values} log-probabilities of prompt tokens are more than the limit of {limit} "
            "(prompt tokens * (alternatives + 1) * n); ask for fewer alternatives or send fewer prompts at once",
            param,
        )


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError for an id outside the vocabulary."""
    if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(
                f"{param} holds {shown(token_id)}, which is no token id; ids are 0 to {vocab_size - 1}", param
            )


def check_priority(priority: int) -> None:
    """Raises InvalidRequestError for what no scheduler can compare."""
    _integer(priority, "priority", _INT64_MIN, _INT64_MAX)


def _check_token_set(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    if len(token_ids) > vocab_size:
        raise InvalidRequestError(f"{param} has {len(token_ids)} entries; there are {vocab_size} token ids", param)
    check_token_ids(token_ids, vocab_size, param)


def _check_numbers(sampling: SamplingParams) -> None:
    _in_range(sampling.temperature, "temperature", 0.0, 2.0)
    _in_range(sampling.min_p, "min_p", 0.0, 1.0)
    _in_range(sampling.presence_penalty, "presence_penalty", -2.0, 2.0)
    _in_range(sampling.frequency_penalty, "frequency_penalty", -2.0, 2.0)
    if not (_is_number(sampling.top_p) and 0.0 < sampling.top_p <= 1.0):
        raise InvalidRequestError(f"top_p must be above 0 and at most 1, got {shown(sampling.top_p)}", "top_p")
    _in_range(sampling.repetition_penalty, "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _integer(sampling.top_k, "top_k", -1, _INT64_MAX)
    if sampling.seed is not None:
        _integer(sampling.seed, "seed", _INT64_MIN, _INT64_MAX)
    for bias in (sampling.logit_bias or {}).values():
        _in_range(bias, "logit_bias", -100.0, 100.0)


def _check_lengths(sampling: SamplingParams) -> None:
    _integer(sampling.n, "n", 1, MAX_CHOICES)
    _integer(sampling.min_tokens, "min_tokens", 0, _INT64_MAX)
    if sampling.max_tokens is not None:
        _integer(sampling.max_tokens, "max_tokens", 1, _INT64_MAX)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({sampling.min_tokens}) must not exceed max_tokens ({sampling.max_tokens})", "min_tokens"
            )
    _non_empty_strings(sampling.stop, "stop", MAX_STOP_CHARS)
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"at most {MAX_BAD_WORDS} bad_words are allowed", "bad_words")
    _non_empty_strings(sampling.bad_words, "bad_words", MAX_BAD_WORD_CHARS)
    if sum(map(len, sampling.bad_words)) > MAX_BAD_WORDS_CHARS:
        raise InvalidRequestError(
            f"all bad_words together may have at most {MAX_BAD_WORDS_CHARS} characters", "bad_words"
        )


def _check_wanted(sampling: SamplingParams, vocab_size: int) -> None:
    wanted, param = sampling.logprob_token_ids, "logprob_token_ids"
    if len(wanted) > MAX_LOGPROB_TOKENS:
        raise InvalidRequestError(f"{param} has {len(wanted)} entries; at most {MAX_LOGPROB_TOKENS} are allowed", param)
    check_token_ids(wanted, vocab_size, param)
    if wanted and sampling.logprobs is None:
        raise InvalidRequestError(f"{param} needs logprobs", param)


def _check_repetition(detection: RepetitionDetection | None) -> None:
    if detection is None:
        return
    param = "repetition_detection"
    if not isinstance(detection, RepetitionDetection):
        raise InvalidRequestError(f"{param} must be a RepetitionDetection, got {shown(detection)}", param)
    _integer(detection.max_pattern_size, f"{param}.max_pattern_size", 1, MAX_PATTERN_SIZE)
    _integer(detection.min_pattern_size, f"{param}.min_pattern_size", 1, detection.max_pattern_size)
    _integer(detection.min_count, f"{param}.min_count", 2, _INT64_MAX)


def _check_logprobs(value: int | None, param: str, vocab_size: int, max_logprobs: int) -> None:
    if value is None:
        return
    if value == -1 and max_logprobs == -1:
        return
    _integer(value, param, 0, vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size))


def _in_range(value: float, param: str, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):
        raise InvalidRequestError(f"{param} must be between {low:g} and {high:g}, got {shown(value)}", param)


def _integer(value: int, param: str, low: int, high: int) -> None:
    if type(value) is not int:
        raise InvalidRequestError(f"{param} must be an integer, got {shown(value)}", param)
    if value < low:
        raise InvalidRequestError(f"{param} must be at least {low}, got {shown(value)}", param)
    if value > high:
        raise InvalidRequestError(f"{param} must be at most {high}, got {shown(value)}", param)


def _non_empty_strings(values: Iterable[str], param: str, max_chars: int) -> None:
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"{param} must hold non-empty strings, got {shown(value)}", param)
        if len(value) > max_chars:
            raise InvalidRequestError(
                f"{param} must hold strings of at most {max_chars} characters, got one of {len(value)}", param
            )


def _is_number(value: object) -> bool:
    return type(value) is float or type(value) is int
