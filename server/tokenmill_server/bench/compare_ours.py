"""Our offline side of a comparison, driven like the peer's script: `python -m tokenmill_server.bench.compare_ours`,
with the flags of `tokenmill serve`."""

import asyncio
import sys
from collections.abc import Sequence

from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.bench.compare_peer import Prompts, StepEvent, serve_tasks
from tokenmill_server.bench.offline import start_engine
from tokenmill_server.processing.generation import TokenLogprob
from tokenmill_server.processing.output_processor import Choice
from tokenmill_server.version import __version__


class TokenmillEngine:
    """`LLM`; single steps through the generator that it wraps."""

    def __init__(self, flags: Sequence[str]) -> None:
        self.name = f"Tokenmill {__version__}"
        self._llm = start_engine(flags)

    def generate(self, prompts: Prompts, output_len: int) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = self._llm.generate([list(prompt) for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def steps(self, prompts: Prompts, output_len: int) -> list[StepEvent]:
        return self._llm.host.run(self._watch(prompts, output_len))

    async def _watch(self, prompts: Prompts, output_len: int) -> list[StepEvent]:
        generator, processor = self._llm.host.generator, self._llm.input_processor
        sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        steps = _Steps(len(prompts))
        requests = [processor.build(processor.take_token_ids(prompt), sampling) for prompt in prompts]
        generations = [generator.start(request, _Watcher(steps, number)) for number, request in enumerate(requests)]
        await steps.done
        for generation in generations:
            generator.close_generation(generation)
        return steps.events


class _Steps:
    """Collects what all prompts get, step by step."""

    def __init__(self, num_open: int) -> None:
        self.events: list[StepEvent] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._num_open = num_open

    def add(self, number: int, time_s: float, num_tokens: int) -> None:
        """All outputs of one step bear the time at which its message came."""
        if not self.events or self.events[-1][0] != time_s:
            self.events.append((time_s, {}))
        self.events[-1][1][number] = num_tokens

    def finished(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self.done.set_result(None)


class _Watcher:
    """Listens to the output of one prompt."""

    def __init__(self, steps: _Steps, number: int) -> None:
        self._steps = steps
        self._number = number

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        if token_ids:
            self._steps.add(self._number, choice.last_token_time, len(token_ids))
        if choice.finish_reason is not None:
            self._steps.finished()

    def on_error(self, error: TokenmillError) -> None:
        if not self._steps.done.done():
            self._steps.done.set_exception(error)


if __name__ == "__main__":
    try:
        serve_tasks(TokenmillEngine)
    except TokenmillError as error:
        sys.exit(f"tokenmill: error: {error.message}")
