"""Finds out that a sequence of tokens goes round in circles, token by token."""

from tokenmill_engine.messages import RepetitionDetection


class RepetitionDetector:
    """Watches one sequence for a pattern that has come so many times in a row.

    For each size of a pattern it counts how many tokens in a row were equal to the one that size before: a pattern of
    `size` tokens has come `min_count` times once `size * (min_count - 1)` were. Costs a comparison per size and token.
    """

    __slots__ = ("_needed", "_recent", "_runs")

    def __init__(self, detection: RepetitionDetection) -> None:
        sizes = range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1)
        self._needed = {size: size * (detection.min_count - 1) for size in sizes}
        self._runs = dict.fromkeys(sizes, 0)
        self._recent: list[int] = []
        """The last tokens, at least as many as the largest pattern has."""

    def push(self, token_id: int) -> bool:
        """Takes the next token. Whether a pattern has come often enough with it."""
        recent, runs, found = self._recent, self._runs, False
        num_recent = len(recent)
        for size, needed in self._needed.items():
            if size > num_recent:
                break
            if recent[-size] == token_id:
                runs[size] += 1
                found = found or runs[size] >= needed
            else:
                runs[size] = 0
        recent.append(token_id)
        if num_recent > 2 * len(runs) + 1024:
            del recent[: num_recent - max(runs)]
        return found
