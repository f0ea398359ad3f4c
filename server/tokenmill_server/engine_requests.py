"""What is sent to an engine core for the choices of a generation, and what it means when one is refused."""

from array import array
from collections.abc import Sequence

import msgspec

from tokenmill_engine.errors import EngineError, InvalidRequestError, NotBegunError, TokenmillError
from tokenmill_engine.messages import AddRequest, Finish, MediaItem, SamplingParams
from tokenmill_server.processing.output_processor import Choice, Generation

_MAX_SEED = 2**63 - 1


def engine_requests(
    generation: Generation, choices: Sequence[Choice], media: tuple[MediaItem, ...]
) -> list[AddRequest]:
    """One request per choice. The choices of a seeded request have consecutive seeds. `media` travel with the first; by
    the time that the others arrive, the engine core has their tensors."""
    request = generation.request
    prompt_token_ids = array("i", request.prompt_token_ids).tobytes()
    sampling = msgspec.structs.replace(request.sampling, n=1, stop=(), bad_words=(), repetition_detection=None)
    without_sent = tuple(
        item if item.shared is not None else msgspec.structs.replace(item, tensors={}) for item in media
    )
    return [
        AddRequest(
            request_id=choice.request_id,
            label=request.label,
            prompt_token_ids=prompt_token_ids,
            sampling=_for_choice(sampling, choice.index),
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            media=media if choice is choices[0] else without_sent,
            second_text=request.second_text,
        )
        for choice in choices
    ]


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & _MAX_SEED)


def error_of(finish: Finish) -> TokenmillError:
    """Why the engine gave a request up."""
    message = finish.message or "the engine failed on this request"
    if finish.retry_after_s is not None:
        return NotBegunError(message, finish.retry_after_s)
    return EngineError(message) if finish.param is None else InvalidRequestError(message, finish.param)
