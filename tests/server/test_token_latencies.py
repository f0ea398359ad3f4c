"""Times between outputs are counted late, but all of them, and by the end of the request."""

import pytest
from prometheus_client import CollectorRegistry

from tests.support.echo_generators import Recorder, generating, request, wait_until
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.token_latencies import TokenLatencies


class Counted:
    """Metrics of a process, and what they say."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = FrontendMetrics("m", 2, 100, registry=self._registry)

    def number(self, engine: int) -> float:
        labels = {"engine": str(engine), "model_name": "m"}
        return self._registry.get_sample_value("tokenmill:inter_token_latency_seconds_count", labels) or 0.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(str(embedded_model_path()))


@pytest.mark.asyncio
async def test_many_are_counted_at_once_and_the_rest_on_demand() -> None:
    counted = Counted()
    latencies = TokenLatencies(counted.metrics)
    numbers = []
    for _ in range(100):
        latencies.of(1).append(0.01)
        latencies.count_many(1)
        numbers.append(counted.number(1))
    assert sorted(set(numbers)) == [0, 64]
    latencies.count(1)
    latencies.count(1)
    assert (counted.number(0), counted.number(1)) == (0, 100)


@pytest.mark.asyncio
async def test_few_are_counted_soon() -> None:
    """Of each engine core, and again those that come later."""
    counted = Counted()
    latencies = TokenLatencies(counted.metrics)
    for number in (1, 2):
        for engine in (0, 1):
            latencies.of(engine).append(0.01)
            latencies.count_many(engine)
            assert counted.number(engine) == number - 1
        await wait_until(lambda number=number: counted.number(0) == counted.number(1) == number)  # type: ignore[misc]


def test_without_metrics_nothing_is_kept() -> None:
    latencies = TokenLatencies(None)
    latencies.of(0).extend([0.01] * 1000)
    latencies.count_many(0)
    assert latencies.of(0) == []


@pytest.mark.asyncio
async def test_all_are_counted_when_a_request_ends_or_is_left(tokenizer: Tokenizer) -> None:
    counted = Counted()
    async with generating(tokenizer, metrics=counted.metrics) as (generator, _):
        await generator.complete_all([request(tokenizer, "a b", max_tokens=20), request(tokenizer, "c", max_tokens=9)])
        assert counted.number(0) == 19 + 8
        endless = generator.start(request(tokenizer, "d", max_tokens=100_000), Recorder())
        await wait_until(lambda: endless.num_tokens > 3)
        num_tokens = endless.num_tokens
        generator.close_generation(endless)
        assert counted.number(0) == 19 + 8 + num_tokens - 1
