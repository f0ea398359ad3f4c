"""Runs beam searches on the engine cores, all beams of a request at once."""

from collections.abc import Sequence

from tokenmill_engine.errors import DeadlineError, InvalidRequestError, OverloadedError
from tokenmill_server.context import ServerContext
from tokenmill_server.deadlines import TIMEOUT_HEADER
from tokenmill_server.processing.beam_search import BeamOptions, BeamSearch
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput


async def search_beams(
    context: ServerContext, requests: Sequence[GenerationRequest], options: BeamOptions, pinned_engine: int | None
) -> list[RequestOutput]:
    """The best continuations of each prompt. If the caller is cancelled the engines stop.

    Raises InvalidRequestError for prompts with media, and what `TextGenerator.complete_all` raises.
    """
    if any(request.media for request in requests):
        raise InvalidRequestError("use_beam_search takes no images or videos", "use_beam_search")
    inputs = context.inputs
    searches = [BeamSearch(request, options, inputs.eos_token_ids, inputs.vocab_size) for request in requests]
    growing, has_begun = searches, False
    while growing:
        batches = [search.requests() for search in growing]
        try:
            outputs = await context.generator.complete_all([each for batch in batches for each in batch], pinned_engine)
        except OverloadedError as error:
            deadline = requests[0].deadline
            if has_begun and deadline is not None and TIMEOUT_HEADER in str(error):
                raise DeadlineError(f"the time of {TIMEOUT_HEADER} was over before the answer was complete") from error
            raise
        has_begun = True
        start = 0
        for search, batch in zip(growing, batches, strict=True):
            search.take(outputs[start : start + len(batch)])
            start += len(batch)
        growing = [search for search in growing if not search.is_done]
    return [search.result(inputs.tokenizer) for search in searches]
