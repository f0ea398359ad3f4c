"""Requests to an engine core over real workers, without sockets, and what they are told."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from tests.support.server import PATIENCE_S
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.engine import EngineCore, Executor
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.messages import AddRequest, FinishReason, SamplingParams, StepOutput
from tokenmill_engine.outputs import KVCapacity


@dataclass
class Told:
    """What one request was told."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    finishes: list[FinishReason] = field(default_factory=list)
    messages: list[str | None] = field(default_factory=list)
    vectors: list[NDArray[np.float32]] = field(default_factory=list)
    num_cached: int = 0


class CoreRequests:
    """An engine core over real workers, and what its requests were told."""

    def __init__(self, config: EngineConfig, executor: Executor, capacity: KVCapacity) -> None:
        self._woken: SimpleQueue[None] = SimpleQueue()
        self.core = EngineCore(config, executor, capacity, wake=lambda: self._woken.put(None))
        self.told: dict[int, Told] = defaultdict(Told)

    def add(self, number: int, prompt: Sequence[int], sampling: SamplingParams, second_text: int = 0) -> int:
        request_id = make_request_id(0, 0, number)
        packed = np.array(prompt, dtype="<i4").tobytes()
        self.core.handle(AddRequest(request_id, "label", packed, sampling, float(number), second_text=second_text))
        return request_id

    def step(self) -> None:
        for _, message in self.core.step():
            if isinstance(message, StepOutput):
                self._take(message)
        self.core.scheduler.check_invariants()

    def run(self) -> list[Told]:
        while self.core.has_work:
            self.step()
        return [self.told[request_id] for request_id in sorted(self.told)]

    def run_until_finished(self, request_ids: Sequence[int]) -> list[Told]:
        """As `run`, of requests that may wait for a grammar first."""
        while not all(self.told[request_id].finishes for request_id in request_ids):
            if not self.core.has_work:
                self._woken.get(timeout=PATIENCE_S)
            self.step()
        return [self.told[request_id] for request_id in request_ids]

    def _take(self, message: StepOutput) -> None:
        told = [self.told[request_id] for request_id in np.frombuffer(message.request_ids, "<i8").tolist()]
        tokens = np.frombuffer(message.token_ids, "<i4").tolist()
        for each, count in zip(told, np.frombuffer(message.num_tokens, "<i4").tolist(), strict=True):
            each.tokens.extend(tokens[:count])
            tokens = tokens[count:]
        for rows in message.logprobs:
            told[rows.index].logprobs.extend(np.frombuffer(rows.logprobs, "<f4").tolist())
        for rows in message.prompt_logprobs:
            told[rows.index].prompt_logprobs.extend(np.frombuffer(rows.logprobs, "<f4").tolist())
        for finish in message.finishes:
            told[finish.index].finishes.append(finish.reason)
            told[finish.index].messages.append(finish.message)
        for vector in message.vectors:
            told[vector.index].vectors.append(np.frombuffer(vector.values, "<f4"))
        for index, num_cached in message.cached_tokens:
            told[index].num_cached = num_cached
