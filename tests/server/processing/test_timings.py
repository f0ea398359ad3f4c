import pytest

from tokenmill_engine.messages import Finish, FinishReason, SamplingParams
from tokenmill_server.processing.collector import Collector
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.output_processor import Generation
from tokenmill_server.processing.timings import timings_of
from tokenmill_server.processing.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio


def generation(tokenizer: Tokenizer, n: int = 1, **sampling: object) -> Generation:
    request = GenerationRequest("", [5], SamplingParams(n=n, **sampling), arrival_time=100.0)  # type: ignore[arg-type]
    return Generation(request, Collector(), tokenizer, 0)


async def test_parts_add_up_from_arrival_on(tokenizer: Tokenizer) -> None:
    one = generation(tokenizer)
    assert timings_of(one) is None  # nothing has come yet
    (choice,) = one.choices
    one.first_token_time, one.prefill_s, one.num_cached_tokens = 102.0, 0.5, 16
    choice.last_token_time = 103.0
    choice.push([504, 504, 504], Finish(0, FinishReason.LENGTH, num_preemptions=2), None)
    assert timings_of(one) == {
        "queue_time_ms": 1500.0,
        "prefill_time_ms": 500.0,
        "time_to_first_token_ms": 2000.0,
        "generation_time_ms": 1000.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
        "num_preemptions": 2,
        "num_cached_tokens": 16,
    }


async def test_what_cannot_be_told(tokenizer: Tokenizer) -> None:
    stopped = generation(tokenizer, stop=("The",))
    (choice,) = stopped.choices
    stopped.first_token_time = choice.last_token_time = 101.0
    assert choice.push([504], None, None)
    timings = timings_of(stopped)
    assert timings is not None
    assert (timings["num_preemptions"], timings["mean_itl_ms"], timings["tokens_per_second"]) == (None, None, None)
    several = generation(tokenizer, n=2)
    several.first_token_time = 101.0
    assert timings_of(several) is None
