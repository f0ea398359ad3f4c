"""What encoding costs: seconds per placeholder, as recent steps had it. Knows nothing of budgets."""

from collections import deque

_NUM_STEPS = 16
"""Steps of which the dearest counts: large images cost more per placeholder, and who keeps a target must not be
surprised by the next one."""


class EncoderCosts:
    """Of one engine. Nothing is known until a step was measured."""

    def __init__(self) -> None:
        self._per_token_s: deque[float] = deque(maxlen=_NUM_STEPS)

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """A step encoded images of `num_tokens` placeholders in `elapsed_s`; 0: nobody looked."""
        if num_tokens > 0 and elapsed_s > 0.0:
            self._per_token_s.append(elapsed_s / num_tokens)

    def seconds(self, num_tokens: int) -> float:
        """What images of so many placeholders are expected to take; 0 if nothing is known."""
        return num_tokens * max(self._per_token_s, default=0.0)
