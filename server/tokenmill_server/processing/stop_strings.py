"""Finds stop strings in text that arrives in pieces, and holds back what may still become one.

The result depends on the text alone, not on how it is cut: the stop string that is complete first wins, of those
complete at the same character the longest. Each character costs constant time per stop string (Knuth-Morris-Pratt).
"""

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Watches one sequence for several stop strings."""

    __slots__ = ("_automata", "_first_characters", "_held", "_include", "matched")

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include_in_output
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str, may_stop: bool = True) -> str:
        """The text that is now certain to be output. After `matched` is set nothing more may be pushed.

        With `may_stop` false, stop strings that become complete in `text` are ordinary text.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text
        buffer = self._held + text
        offset = len(self._held)
        for position, character in enumerate(text, offset + 1):
            for automaton in self._automata:
                if automaton.step(character) and may_stop:
                    self.matched = automaton.stop
                    self._held = ""
                    return buffer[: position if self._include else position - len(automaton.stop)]
        num_held = max(automaton.num_matched for automaton in self._automata)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return buffer[:cut]

    def flush(self) -> str:
        """What was held back, at the end of a sequence that did not match."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the text so far ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest proper prefix of `stop` at the end of the text."""
        self._fallback = _borders(stop)

    def step(self, character: str) -> bool:
        """Whether `character` completes the stop string."""
        matched = self.num_matched
        while matched and self.stop[matched] != character:
            matched = self._fallback[matched - 1]
        if self.stop[matched] == character:
            matched += 1
        complete = matched == len(self.stop)
        self.num_matched = self._fallback[matched - 1] if complete else matched
        return complete


@lru_cache(maxsize=256)
def _borders(pattern: str) -> tuple[int, ...]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix. All choices of a
    request, and of the next ones like it, share one table."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return tuple(borders)
