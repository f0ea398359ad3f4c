"""Loads for simulated clusters. Prompts are random tokens; outputs have about the same length."""

import itertools
import random
from collections.abc import Iterator, Sequence

from tests.support.simulated_cluster import Arrival
from tests.support.simulated_device import TOKEN

_OUTPUT_LEN = 64


class Loads:
    """Makes loads; two with the same seed make the same ones."""

    def __init__(self, seed: int = 0, output_len: int = _OUTPUT_LEN) -> None:
        self._random = random.Random(seed)
        self._output_len = output_len

    def shared_prefixes(
        self, num_prefixes: int = 64, num_each: int = 32, prefix_len: int = 1024, tail_len: int = 128
    ) -> list[tuple[Sequence[int], int]]:
        """Prompts and output lengths, shuffled: `num_each` with each prefix, every tail its own."""
        prefixes = [self._tokens(prefix_len) for _ in range(num_prefixes)]
        chosen = [prefix for prefix in prefixes for _ in range(num_each)]
        self._random.shuffle(chosen)
        return [(prefix + self._tokens(tail_len), self._length()) for prefix in chosen]

    def own_prompts(self, num_requests: int, prompt_len: int = 1024) -> list[tuple[Sequence[int], int]]:
        """Nothing is shared."""
        return [(self._tokens(prompt_len), self._length()) for _ in range(num_requests)]

    def at_once(self, requests: Sequence[tuple[Sequence[int], int]]) -> Iterator[Arrival]:
        """All of them at time 0."""
        return (Arrival(0.0, prompt, length) for prompt, length in requests)

    def poisson(self, requests: Sequence[tuple[Sequence[int], int]], rate: float) -> Iterator[Arrival]:
        """`rate` of them in a second, at random times."""
        now = 0.0
        for prompt, length in requests:
            now += self._random.expovariate(rate)
            yield Arrival(now, prompt, length)

    def closed_loop(self, requests: Sequence[tuple[Sequence[int], int]], num_clients: int) -> Iterator[Arrival]:
        """Each client sends the next one when it has an answer."""
        left = iter(requests)

        def send(now: float) -> Arrival | None:
            request = next(left, None)
            return None if request is None else Arrival(now, *request, next=send)

        return (arrival for _ in range(num_clients) if (arrival := send(0.0)) is not None)

    def chats(
        self, num_chats: int, num_turns: int, rate: float, think_s: float, system_len: int = 256, turn_len: int = 100
    ) -> Iterator[Arrival]:
        """Conversations over one system prompt; each turn's prompt is everything said before and something new."""
        system = self._tokens(system_len)
        now = 0.0
        for _ in range(num_chats):
            now += self._random.expovariate(rate)
            yield self._turn(now, system, turn_len, num_turns, think_s)

    def _turn(self, now: float, history: list[int], turn_len: int, num_left: int, think_s: float) -> Arrival:
        prompt = history + self._tokens(turn_len)
        length = self._length()

        def answer(then: float) -> Arrival | None:
            if num_left == 1:
                return None
            later = then + self._random.expovariate(1.0 / think_s)
            return self._turn(later, [*prompt, *itertools.repeat(TOKEN, length)], turn_len, num_left - 1, think_s)

        return Arrival(now, prompt, length, next=answer)

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(10, 40_000), k=length)

    def _length(self) -> int:
        return self._random.randint(self._output_len // 2, self._output_len * 3 // 2)
