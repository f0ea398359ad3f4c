"""How long the parts of one answer took, from the arrival of its HTTP request on (`--enable-per-request-metrics`)."""

from typing import Any

from tokenmill_server.processing.output_processor import Generation

_MS = 1000.0


def timings_of(generation: Generation) -> dict[str, Any] | None:
    """Of an answer with one choice that is complete, in milliseconds; None for several, whose times overlap.

    `queue_time_ms` and `prefill_time_ms` add up to `time_to_first_token_ms`: what is not prefill is waiting, for the
    tokenizer, media, a turn in the engine core, and messages on their way. `num_preemptions` is None where a stop
    string ended the answer: the engine core, which counts them, was not asked.
    """
    first = generation.first_token_time
    if len(generation.choices) != 1 or first is None:
        return None
    (choice,) = generation.choices
    to_first_s = first - generation.request.arrival_time
    prefill_s = min(generation.prefill_s, to_first_s)
    decode_s = choice.last_token_time - first
    num_later = choice.num_tokens - 1
    return {
        "queue_time_ms": (to_first_s - prefill_s) * _MS,
        "prefill_time_ms": prefill_s * _MS,
        "time_to_first_token_ms": to_first_s * _MS,
        "generation_time_ms": decode_s * _MS,
        "mean_itl_ms": decode_s / num_later * _MS if num_later else None,
        "tokens_per_second": num_later / decode_s if decode_s else None,
        "num_preemptions": generation.num_preemptions,
        "num_cached_tokens": generation.num_cached_tokens,
    }
