"""Generates text for prompts: joins the engine client with detokenization. Used by the HTTP routes and by `LLM`."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from tokenmill_engine.errors import EngineDeadError, EngineError, TokenmillError
from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EngineStalled
from tokenmill_engine.messages import (
    EngineReady,
    Finish,
    FinishReason,
    MediaItem,
    StepOutput,
    TokenLogprobs,
)
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.balancing.prompt_blocks import PromptBlocks
from tokenmill_server.deadlines import check_deadline, is_over, set_deadline
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.engine_requests import engine_requests, error_of
from tokenmill_server.media_resending import MediaResender
from tokenmill_server.processing.collector import Collector, all_done
from tokenmill_server.processing.generation import GenerationRequest, RequestOutput
from tokenmill_server.processing.output_processor import Choice, Generation, OutputListener
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.token_latencies import TokenLatencies

logger = logging.getLogger(__name__)

_STARTED_AT_A_TIME = 32
"""Requests that one turn of the event loop starts: a few milliseconds."""
_MIN_OTHERS = 2
"""Engine cores that take requests of a lost one: if one of these is what ended it, another core is left."""


class TextGenerator:
    """Every generation started here ends: with a finish reason for each choice, with an error, or aborted by us."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, metrics: FrontendMetrics | None = None) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics
        if metrics is not None:
            client.on_sent = metrics.count_sent
        self._choices: dict[int, Choice] = {}
        self._num_unsettled: Counter[int] = Counter()
        """By engine: sequences that have failed because its connection broke. One that lives counts them itself, as
        aborted, when it is greeted again."""
        self.on_queue: Callable[[int, int], None] = _nobody_counts
        """Called with the open sequences, and the prompt tokens of those without an answer, when they have changed."""
        self._num_queued_tokens = 0
        self._latencies = TokenLatencies(metrics)
        self._on_drained: dict[int, Callable[[], None]] = {}
        """By engine that drains and has something open here."""
        client.on_output = self._on_step
        self._resender = MediaResender(self._choices, self._send_again, self.fail)
        client.on_media_missing = self._resender.missing

    async def connect(self, engine: EngineReady) -> None:
        """Connects to an engine core. Raises EngineDeadError if it is gone or does not answer."""
        await self._client.connect(engine)
        del self._num_unsettled[engine.engine]

    def misses(self, engine: EngineReady) -> bool:
        """Whether this incarnation of an engine core is not connected, though nobody has said that it is lost."""
        return self._client.misses(engine)

    def on_connection_broken(self, call: Callable[[EngineReady], None]) -> None:
        """`call` is called when an engine core is not connected any more. It gets no new requests; what is open there
        still waits."""
        self._client.on_connection_broken = call

    def around_outputs(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Whenever outputs have come, `before` is called, they are handed to their listeners, and `after` is called."""
        self._client.on_waking, self._client.on_drained = before, after

    def disconnect(self) -> None:
        """Lets go of the engine cores. Nothing may be open."""
        self._client.close()

    @property
    def num_open(self) -> int:
        """Sequences that the engines still work on."""
        return len(self._choices)

    def start(
        self, request: GenerationRequest, listener: OutputListener, pinned_engine: int | None = None
    ) -> Generation:
        """Sends the request's choices to the engine that the balancer chooses (or the pinned one), all to the same.

        Raises EngineUnavailableError if the pinned engine is gone or not connected, EngineDeadError if all are gone,
        OverloadedError if the request's deadline has passed.
        """
        check_deadline(request)
        prompt = self._describe(request)
        engine = self._client.choose_engine(prompt, pinned_engine)
        generation = Generation(request, listener, self._tokenizer, engine)
        generation.may_move = pinned_engine is None
        for choice in generation.choices:
            choice.request_id = self._client.new_request_id()
        supply = request.media_supply
        media = request.media if supply is None else supply.outgoing(self._client.shares_memory(engine))
        try:
            requests = [] if media is None else engine_requests(generation, generation.choices, media)
            self._client.add(engine, requests, prompt)
        except BaseException:
            if supply is not None:
                supply.end()
            raise
        for choice in generation.choices:
            self._choices[choice.request_id] = choice
        generation.num_queued_tokens = len(request.prompt_token_ids)
        self._num_queued_tokens += generation.num_queued_tokens
        set_deadline(generation, self.fail)
        self._tell_queue()
        if media is None:
            self._resender.send_later(generation)
        return generation

    def abort(self, generation: Generation) -> None:
        """Stops whatever is still open. The listener hears nothing more."""
        open_ids = [choice.request_id for choice in generation.choices if choice.request_id in self._choices]
        for request_id in open_ids:
            del self._choices[request_id]
        self._latencies.count(generation.engine)
        self._resender.give_up(generation)
        self._client.abort(generation.engine, open_ids, FinishReason.ABORT)
        if generation.deadline_timer is not None:
            generation.deadline_timer.cancel()
        self._leave_queue(generation)
        self._tell_queue()
        if generation.request.media_supply is not None:
            generation.request.media_supply.end()

    def close_generation(self, generation: Generation) -> None:
        """Aborts what is still open and takes the generation apart: its memory is free at once, without a search for
        reference circles. Whoever started a generation ends with this."""
        self.abort(generation)
        generation.choices.clear()

    async def complete(self, request: GenerationRequest, pinned_engine: int | None = None) -> RequestOutput:
        """Generates all choices of one prompt; see `complete_all`."""
        return (await self.complete_all([request], pinned_engine))[0]

    async def complete_all(
        self, requests: Sequence[GenerationRequest], pinned_engine: int | None = None
    ) -> list[RequestOutput]:
        """Generates all choices of all prompts at once. If the caller is cancelled, or one fails, the engines stop.

        Raises EngineError if an engine failed.
        """
        started: list[tuple[Generation, Collector]] = []
        try:
            for index, request in enumerate(requests, start=1):
                collector = Collector()
                started.append((self.start(request, collector, pinned_engine), collector))
                if index % _STARTED_AT_A_TIME == 0:
                    await asyncio.sleep(0)
            await all_done([collector for _, collector in started])
            if len(requests) > _STARTED_AT_A_TIME or (requests and requests[0].sampling.prompt_logprobs is not None):
                return await asyncio.to_thread(_results, started)
            return _results(started)
        finally:
            for generation, collector in started:
                self.close_generation(generation)
                collector.leave()

    def engine_lost(self, lost: EngineLost) -> None:
        """Fails everything that is open on an engine that is gone, and counts it. Where two others are left, they get
        that of which nothing has come back, once."""
        self._client.disconnect(lost)
        self._move(lost)
        self.fail_engine(lost.engine, EngineDeadError(lost.message))
        # An end that the engine had counted, but not sent yet, counts twice: within a millisecond of its death nobody
        # can tell which ends those were.
        num_lost = self._num_unsettled.pop(lost.engine, 0)
        if self._metrics is not None:
            self._metrics.lost_requests[lost.engine].inc(num_lost)

    def engine_drains(self, draining: EngineDraining, on_drained: Callable[[], None]) -> None:
        """New requests go elsewhere from now on. `on_drained` is called once nothing is open on the engine: now, if
        nothing is."""
        self._client.drain(draining)
        self._on_drained[draining.engine] = on_drained
        self._tell_drained()

    def engine_stalls(self, change: EngineStalled | EngineRecovered) -> None:
        """New requests go elsewhere while an engine is stalled, if anywhere."""
        self._client.engine_stalls(change)

    def fail_engine(self, engine: int, error: TokenmillError) -> None:
        """Ends everything that is open on an engine with `error`. The engine is gone or not connected: what becomes of
        these requests there is settled when it is lost or connected again."""
        choices = [choice for choice in self._choices.values() if choice.generation.engine == engine]
        self._num_unsettled[engine] += len(choices)
        for generation in {id(choice.generation): choice.generation for choice in choices}.values():
            self.fail(generation, error)

    def fail_all(self, error: TokenmillError) -> None:
        """Ends everything that is open with `error`."""
        for generation in {id(c.generation): c.generation for c in self._choices.values()}.values():
            self.fail(generation, error)

    def fail(self, generation: Generation, error: TokenmillError) -> None:
        """Ends one generation with `error`."""
        self.abort(generation)
        generation.listener.on_error(error)

    def _describe(self, request: GenerationRequest) -> PromptBlocks:
        return self._client.balancer.describe(
            request.prompt_token_ids,
            num_sequences=request.sampling.n,
            cache_salt=request.cache_salt,
            reads_cache=request.sampling.prompt_logprobs is None,
            media=request.media,
        )

    def _move(self, lost: EngineLost) -> None:
        if self._client.num_taking < _MIN_OTHERS:
            return
        of_engine = {
            id(c.generation): c.generation for c in self._choices.values() if c.generation.engine == lost.engine
        }
        num_moved = sum(_may_move(generation) and self._moved(generation) for generation in of_engine.values())
        if num_moved:
            logger.info("%s: others have %d of its %d requests", lost.message, num_moved, len(of_engine))
            self._tell_queue()

    def _moved(self, generation: Generation) -> bool:
        """Whether another engine core has a generation now, with the same ids: the one that is gone answers no more."""
        request, before = generation.request, generation.engine
        prompt = self._describe(request)
        try:
            generation.engine = self._client.choose_engine(prompt)
            comes_later = request.media_supply is not None
            requests = [] if comes_later else engine_requests(generation, generation.choices, request.media)
            self._client.add(generation.engine, requests, prompt)
        except EngineError:
            generation.engine = before
            return False
        generation.may_move = False
        if comes_later:
            self._resender.give_up(generation)
            self._resender.send_later(generation)
        return True

    def _leave_queue(self, generation: Generation) -> None:
        self._num_queued_tokens -= generation.num_queued_tokens
        generation.num_queued_tokens = 0

    def _tell_queue(self) -> None:
        self.on_queue(len(self._choices), self._num_queued_tokens)
        if self._on_drained:
            self._tell_drained()

    def _tell_drained(self) -> None:
        busy = {choice.generation.engine for choice in self._choices.values()}
        for engine in self._on_drained.keys() - busy:
            self._on_drained.pop(engine)()

    def _send_again(self, generation: Generation, choices: Sequence[Choice], media: tuple[MediaItem, ...]) -> None:
        self._client.add_again(generation.engine, engine_requests(generation, choices, media))

    # --- outputs of a step ----------------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput) -> None:
        request_ids: list[int] = memoryview(output.request_ids).cast("q").tolist()
        num_tokens: list[int] = memoryview(output.num_tokens).cast("i").tolist()
        token_ids: list[int] = memoryview(output.token_ids).cast("i").tolist()
        if output.cached_tokens or output.prefill_times or output.prompt_logprobs or output.vectors:
            self._take_prompt_results(output, request_ids)
        finishes = {finish.index: finish for finish in output.finishes} if output.finishes else {}
        logprobs = {piece.index: piece for piece in output.logprobs} if output.logprobs else {}
        queue = len(self._choices), self._num_queued_tokens
        step = _Step(output.engine, time.monotonic(), self._latencies.of(output.engine))
        start = 0
        for index, request_id in enumerate(request_ids):
            end = start + num_tokens[index]
            choice = self._choices.get(request_id)
            if choice is not None:  # else it was aborted while the engine worked on it
                self._take_tokens(choice, token_ids[start:end], finishes.get(index), logprobs.get(index), step)
            start = end
        for reason, request_ids_stopped in step.stopped.items():
            self._client.abort(output.engine, request_ids_stopped, reason)
        if queue != (len(self._choices), self._num_queued_tokens):
            self._tell_queue()
            self._latencies.count(output.engine)
        else:
            self._latencies.count_many(output.engine)

    def _take_prompt_results(self, output: StepOutput, request_ids: list[int]) -> None:
        for index, num_cached in output.cached_tokens:
            choice = self._choices.get(request_ids[index])
            if choice is not None and choice.index == 0:
                choice.generation.num_cached_tokens = num_cached
        for index, prefill_s in output.prefill_times:
            choice = self._choices.get(request_ids[index])
            if choice is not None and choice.index == 0:
                choice.generation.prefill_s = prefill_s
        for piece in output.prompt_logprobs:
            choice = self._choices.get(request_ids[piece.index])
            if choice is not None:
                choice.generation.add_prompt_logprobs(choice, piece)
        for vector in output.vectors:
            choice = self._choices.get(request_ids[vector.index])
            if choice is not None:
                choice.generation.vector = vector.values

    def _take_tokens(
        self,
        choice: Choice,
        token_ids: list[int],
        finish: Finish | None,
        logprobs: TokenLogprobs | None,
        step: "_Step",
    ) -> None:
        generation = choice.generation
        if finish is not None and finish.reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.fail(generation, error_of(finish))
            return
        if finish is None and not token_ids:
            return
        if token_ids:
            self._time_tokens(choice, step)
        try:
            stopped = choice.push(token_ids, finish, logprobs)
        except Exception:  # a fault of ours in one request must not keep the others from their tokens
            logger.exception("%s: cannot process output", generation.request.label)
            self.fail(generation, EngineError("internal error while processing the output"))
            return
        if choice.finish_reason is not None:
            del self._choices[choice.request_id]
            if stopped:
                step.stopped.setdefault(choice.finish_reason, []).append(choice.request_id)
            if generation.num_open == 0:
                self._count_finished(generation, step)

    # --- metrics --------------------------------------------------------------------------------------------------

    def _time_tokens(self, choice: Choice, step: "_Step") -> None:
        if choice.last_token_time:
            step.latencies.append(step.time - choice.last_token_time)
        else:
            generation = choice.generation
            generation.answered()
            if generation.first_token_time is None:
                generation.first_token_time = step.time
                self._leave_queue(generation)
                if self._metrics is not None:
                    waited = step.time - generation.request.arrival_time
                    self._metrics.time_to_first_token[step.engine].observe(waited)
        choice.last_token_time = step.time

    def _count_finished(self, generation: Generation, step: "_Step") -> None:
        metrics = self._metrics
        if metrics is None:
            return
        engine = generation.engine
        metrics.e2e_request_latency[engine].observe(step.time - generation.request.arrival_time)
        metrics.request_params_n[engine].observe(len(generation.choices))
        longest = max(choice.num_tokens for choice in generation.choices)
        metrics.request_max_num_generation_tokens[engine].observe(longest)
        if generation.first_token_time is not None and longest > 1:
            metrics.request_time_per_output_token[engine].observe(
                (step.time - generation.first_token_time) / (longest - 1)
            )


def _may_move(generation: Generation) -> bool:
    """Whether nothing of its answer has come, and neither its client nor its deadline nor an earlier move forbids."""
    return generation.may_move and not generation.has_begun and not is_over(generation.request)


def _nobody_counts(_num_sequences: int, _num_tokens: int) -> None:
    pass


class _Step:
    """What accumulates while the outputs of one engine step are handed out."""

    __slots__ = ("engine", "latencies", "stopped", "time")

    def __init__(self, engine: int, now: float, latencies: list[float]) -> None:
        self.engine = engine
        self.time = now
        self.latencies = latencies
        self.stopped: dict[FinishReason, list[int]] = {}
        """Requests that this front end has ended, by why."""


def _results(finished: Sequence[tuple[Generation, Collector]]) -> list[RequestOutput]:
    return [collector.result(generation) for generation, collector in finished]
