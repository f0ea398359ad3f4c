"""A `TextGenerator` in front of echo engines."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.support.echo_engine import EchoEngine
from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.processing.generation import GenerationRequest, TokenLogprob
from tokenmill_server.processing.output_processor import Choice
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.text_generator import TextGenerator


@asynccontextmanager
async def generating(
    tokenizer: Tokenizer, num_engines: int = 1, metrics: FrontendMetrics | None = None, **options: Any
) -> AsyncIterator[tuple[TextGenerator, list[EchoEngine]]]:
    with tempfile.TemporaryDirectory(prefix="tokenmill-test-") as run_dir:
        engines = [EchoEngine(run_dir, index, **options).start() for index in range(num_engines)]
        generator = TextGenerator(EngineClient(0, 0, LoadBalancer(num_engines)), tokenizer, metrics)
        for engine in engines:
            await generator.connect(engine.ready())
        try:
            yield generator, engines
        finally:
            generator.disconnect()
            for engine in engines:
                engine.stop()


def request(tokenizer: Tokenizer, text: str, **sampling: Any) -> GenerationRequest:
    options = {"temperature": 0.0, "max_tokens": 8, **sampling}
    return GenerationRequest("label", tokenizer.encode(text), SamplingParams(**options), 0.0, text)


class Recorder:
    """A listener that only remembers how it ended."""

    def __init__(self) -> None:
        self.error: TokenmillError | None = None

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        """Text does not matter here."""

    def on_error(self, error: TokenmillError) -> None:
        self.error = error


async def wait_until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)
