"""The load of one rank as one API server estimates it: what the engine reported last, and what was sent since."""

from collections import deque
from dataclasses import dataclass

from tokenmill_engine.messages import EngineLoad


@dataclass(slots=True)
class TypicalRequest:
    """Averages over the requests that this API server has sent lately: they stand for those of the others."""

    prompt_tokens: float = 0.0
    """Of one sequence."""
    missing_share: float = 1.0
    """Part of a prompt that its rank had to compute."""
    weight: float = 1.0

    def observe(self, num_tokens: int, num_missing: int) -> None:
        """A prompt was sent to a rank that lacked `num_missing` of its tokens."""
        self.prompt_tokens += self.weight * (num_tokens - self.prompt_tokens)
        self.missing_share += self.weight * (num_missing / max(num_tokens, 1) - self.missing_share)
        self.weight = max(0.01, self.weight / (1.0 + self.weight))


class RankLoad:
    """Of one engine core. Work is counted in prompt tokens to compute."""

    __slots__ = ("_num_sent", "_unconfirmed", "num_unconfirmed_tokens", "reported")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The engine has no memory of what was sent: it is another one."""
        self.reported = EngineLoad()
        self.num_unconfirmed_tokens = 0
        """Work of the sequences that `reported` does not count."""
        self._num_sent = 0
        self._unconfirmed: deque[int] = deque()
        """Work of each of them, oldest first."""

    @property
    def num_unconfirmed(self) -> int:
        """Sequences of this API server that `reported` does not count."""
        return len(self._unconfirmed)

    def sent(self, num_tokens: int, num_sequences: int) -> None:
        """Sequences of one prompt were sent, of which `num_tokens` have to be computed."""
        self._num_sent += num_sequences
        self.num_unconfirmed_tokens += num_tokens
        self._unconfirmed.append(num_tokens)
        self._unconfirmed.extend([0] * (num_sequences - 1))

    def report(self, load: EngineLoad) -> None:
        """The engine told its load."""
        self.reported = load
        num_left = 0 if load.num_received is None else self._num_sent - load.num_received
        while len(self._unconfirmed) > max(num_left, 0):
            self.num_unconfirmed_tokens -= self._unconfirmed.popleft()

    def num_sequences(self, num_senders: int) -> int:
        """Sequences that wait or run there, if each of `num_senders` API servers has sent as many as this one since
        the report."""
        return self.reported.num_running + self.reported.num_waiting + num_senders * self.num_unconfirmed

    def num_prompt_tokens(self, num_senders: int, typical: TypicalRequest) -> float:
        """Prompt tokens that are still to be computed there, on the same condition."""
        return num_senders * self.num_unconfirmed_tokens + self.reported.num_waiting_tokens * typical.missing_share
