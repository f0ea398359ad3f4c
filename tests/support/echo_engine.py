"""An engine core without a model: speaks the real ZeroMQ protocol, answers every request with its own prompt.

Output token i is prompt token (i + shift) modulo the prompt's length; `shift` is 0 for greedy requests, else a hash of
the seed. It ends at `max_tokens`, at an end token and at `stop_token_ids` as a real engine does. Log-probabilities
are made up but depend on the token alone.
"""

import random
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from tokenmill_engine.ipc.frames import MessageDecoder, receive_frames
from tokenmill_engine.ipc.ids import client_identity, client_of
from tokenmill_engine.ipc.sockets import bind_router, bound_endpoint, local_endpoints
from tokenmill_engine.media_store import MediaStore
from tokenmill_engine.messages import (
    AbortRequests,
    AddRequest,
    Endpoints,
    EngineLoad,
    EngineReady,
    Finish,
    FinishReason,
    Hello,
    MediaMissing,
    PooledVector,
    StepOutput,
    TokenLogprobs,
)

POISON = 4
"""A prompt that begins with this id (`<reponame>` of SmolLM2) fails in the engine."""


def made_up_logprob(token_id: int) -> float:
    return -1.0 - token_id % 7


def echo_tokens(prompt: list[int], count: int, shift: int = 0) -> list[int]:
    """What the engine answers."""
    return [prompt[(index + shift) % len(prompt)] for index in range(count)]


def echo_vector(prompt: list[int], size: int) -> list[float]:
    """What the engine makes of a prompt."""
    return [float(sum(prompt) % (index + 7) - 3 * index) for index in range(size)]


@dataclass
class Sequence:
    """A request being answered."""

    request: AddRequest
    prompt: list[int]
    shift: int
    num_output: int = 0


@dataclass
class EchoEngine:
    """Runs in a thread of the test. `step_s` is how long a step takes; `tokens_per_step` may vary at random."""

    run_dir: str
    engine: int = 0
    eos_token_ids: tuple[int, ...] = (2,)
    max_model_len: int = 8192
    step_s: float = 0.0
    tokens_per_step: int = 1
    incarnation: int = 0
    media: MediaStore | None = None
    """What it has of media that come without tensors, asking for what it has not; None: it does not look."""
    over_tcp: bool = False
    """Reached as one on another machine."""
    num_segments: int = 0
    """As in `EngineReady`."""
    vector_size: int = 0
    """Above 0: every request is answered with a vector, `echo_vector` of its prompt."""
    added: list[AddRequest] = field(default_factory=list)
    """Every request ever received."""
    aborted: list[tuple[int, FinishReason]] = field(default_factory=list)
    num_missing: int = 0
    """Requests that were asked for again."""

    def start(self) -> "EchoEngine":
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoints = local_endpoints(self.run_dir, self.engine, self.incarnation)
        if self.over_tcp:
            endpoints = Endpoints("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
        self._input = bind_router(self._context, endpoints.input)
        self._output = bind_router(self._context, endpoints.output)
        self._endpoints = Endpoints(bound_endpoint(self._input), bound_endpoint(self._output))
        self._running: dict[int, Sequence] = {}
        self._missing: dict[int, list[int]] = {}
        self._waiting: deque[Sequence] = deque()
        self._decoder = MessageDecoder()
        self._stopping = threading.Event()
        self.paused = threading.Event()
        """While set, nothing is generated."""
        self._thread = threading.Thread(target=self._run, name=f"echo-engine-{self.engine}")
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._input.close()
        self._output.close()
        self._context.term()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def ready(self) -> EngineReady:
        sizes = (self.max_model_len, 100, 16, 1600)
        return EngineReady(
            self.engine, self.incarnation, self._endpoints, *sizes, "echo", num_segments=self.num_segments
        )

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._receive(0 if self._running and not self.paused.is_set() else 10)
            if self._running and not self.paused.is_set():
                self._step()
                if self.step_s:
                    time.sleep(self.step_s)

    def _receive(self, timeout_ms: int) -> None:
        while self._input.poll(timeout_ms):
            _, *frames = receive_frames(self._input)
            timeout_ms = 0
            match self._decoder.decode(frames):
                case AddRequest() as request:
                    self._add(request)
                case Hello(client=client):
                    self._running = {each: run for each, run in self._running.items() if client_of(each) != client}
                case AbortRequests(request_ids=request_ids, reason=reason):
                    self.aborted.extend((request_id, reason) for request_id in request_ids)
                    for request_id in request_ids:
                        self._running.pop(request_id, None)
                        self._let_go(request_id)

        for client, missing in self._missing.items():
            frame = msgspec.msgpack.encode(MediaMissing(self.engine, missing))
            self._output.send_multipart([client_identity(client), frame])
        self._missing.clear()

    def _add(self, request: AddRequest) -> None:
        if self.media is not None:
            media = self.media.complete(request.media)
            if media is None:
                self._missing.setdefault(client_of(request.request_id), []).append(request.request_id)
                self.num_missing += 1
                return
            self.media.hold(request.request_id, media)
        self.added.append(request)
        prompt = list(struct.unpack(f"<{len(request.prompt_token_ids) // 4}i", request.prompt_token_ids))
        sampling = request.sampling
        seed = sampling.seed if sampling.seed is not None else request.request_id
        shift = 0 if sampling.temperature == 0 else random.Random(seed).randrange(len(prompt))
        self._running[request.request_id] = Sequence(request, prompt, shift)

    def _let_go(self, request_id: int) -> None:
        if self.media is not None:
            self.media.release(request_id)

    def _step(self) -> None:
        by_client: dict[int, list[Sequence]] = {}
        for sequence in self._running.values():
            by_client.setdefault(client_of(sequence.request.request_id), []).append(sequence)
        for client, sequences in by_client.items():
            frame = msgspec.msgpack.encode(self._output_of(sequences))
            self._output.send_multipart([client_identity(client), frame])

    def _output_of(self, sequences: list[Sequence]) -> StepOutput:
        counts: list[int] = []
        tokens: list[int] = []
        finishes: list[Finish] = []
        logprobs: list[TokenLogprobs] = []
        prompt_logprobs: list[TokenLogprobs] = []
        cached: list[tuple[int, int]] = []
        vectors: list[PooledVector] = []
        for index, sequence in enumerate(sequences):
            first = sequence.num_output == 0
            if sequence.prompt[0] == POISON:
                counts.append(0)
                finishes.append(Finish(index, FinishReason.ERROR, message="the logits are not numbers"))
                continue
            if self.vector_size:
                counts.append(0)
                finishes.append(Finish(index, FinishReason.STOP))
                values = echo_vector(sequence.prompt, self.vector_size)
                vectors.append(PooledVector(index, struct.pack(f"<{len(values)}f", *values)))
                continue
            new, finish = self._advance(index, sequence)
            counts.append(len(new))
            tokens.extend(new)
            sampling = sequence.request.sampling
            if finish is not None:
                finishes.append(finish)
            if sampling.logprobs is not None:
                logprobs.append(_logprobs(index, new, sampling.logprobs))
            if first:
                cached.append((index, len(sequence.prompt) // 16 * 16))
                if sampling.prompt_logprobs is not None:
                    prompt_logprobs.append(_logprobs(index, sequence.prompt[1:], sampling.prompt_logprobs))
        request_ids = [sequence.request.request_id for sequence in sequences]
        for finish in finishes:
            del self._running[request_ids[finish.index]]
            self._let_go(request_ids[finish.index])
        return StepOutput(
            engine=self.engine,
            request_ids=struct.pack(f"<{len(request_ids)}q", *request_ids),
            num_tokens=struct.pack(f"<{len(counts)}i", *counts),
            token_ids=struct.pack(f"<{len(tokens)}i", *tokens),
            load=EngineLoad(len(self._running), 0, 0.0),
            finishes=finishes,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=cached,
            vectors=vectors,
        )

    def _advance(self, index: int, sequence: Sequence) -> tuple[list[int], Finish | None]:
        sampling = sequence.request.sampling
        limit = sampling.max_tokens or self.max_model_len
        new: list[int] = []
        while len(new) < self.tokens_per_step:
            token = sequence.prompt[(sequence.num_output + sequence.shift) % len(sequence.prompt)]
            new.append(token)
            sequence.num_output += 1
            if sequence.num_output >= sampling.min_tokens:
                if token in self.eos_token_ids and not sampling.ignore_eos:
                    return new, Finish(index, FinishReason.STOP)
                if token in sampling.stop_token_ids:
                    return new, Finish(index, FinishReason.STOP, stop_token_id=token)
            if sequence.num_output >= limit:
                return new, Finish(index, FinishReason.LENGTH)
        return new, None


def _logprobs(index: int, tokens: list[int], num_top: int) -> TokenLogprobs:
    """The alternatives of token t are t + 1, t + 2, ..."""
    ids: list[int] = []
    for token in tokens:
        ids.extend(range(token, token + num_top + 1))
    values = [made_up_logprob(token_id) if token_id % 50 else float("-inf") for token_id in ids]
    return TokenLogprobs(
        index=index,
        num_top=num_top,
        token_ids=struct.pack(f"<{len(ids)}i", *ids),
        logprobs=struct.pack(f"<{len(values)}f", *values),
        ranks=struct.pack(f"<{len(tokens)}i", *[1 + token % 3 for token in tokens]),
    )
