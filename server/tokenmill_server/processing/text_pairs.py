"""Two texts in one prompt: what a tokenizer puts around them, and what is left of both where they are too long."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Encoding

from tokenmill_engine.errors import ConfigError


@dataclass(slots=True, frozen=True)
class PairFrame:
    """Ids around the texts of a pair, whatever the texts are."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    behind: tuple[int, ...]
    second_from: int | None
    """How many tokens after the end of the first text those of the second kind begin; None: there are none."""

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.between) + len(self.behind)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Ids of the pair, and where its second kind begins."""
        token_ids = [*self.before, *first, *self.between, *second, *self.behind]
        if self.second_from is None:
            return token_ids, len(token_ids)
        return token_ids, len(self.before) + len(first) + self.second_from


def frame_of(pair: Encoding) -> PairFrame:
    """The frame of a pair, neither text of which is empty. Raises ConfigError for one that is not around both."""
    texts = pair.sequence_ids
    first, second = ([index for index, text in enumerate(texts) if text == wanted] for wanted in (0, 1))
    if not _is_run(first) or not _is_run(second) or first[-1] > second[0]:
        raise ConfigError("the tokenizer makes pairs of texts in a way that is not supported")
    end = first[-1] + 1
    begin = next((index for index, kind in enumerate(pair.type_ids) if kind), None)
    if begin is not None and begin < end:
        raise ConfigError("the tokenizer marks pairs of texts in a way that is not supported")
    ids = tuple(pair.ids)
    return PairFrame(
        before=ids[: first[0]],
        between=ids[end : second[0]],
        behind=ids[second[-1] + 1 :],
        second_from=None if begin is None else begin - end,
    )


def cut_pair(first: Sequence[int], second: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """What is left of two texts that have `room` tokens together: the longer one loses its end, or both do."""
    if len(first) <= len(second):
        num_first = min(len(first), room // 2)
        return first[:num_first], second[: room - num_first]
    num_second = min(len(second), room // 2)
    return first[: room - num_second], second[:num_second]


def _is_run(indices: Sequence[int]) -> bool:
    return bool(indices) and indices[-1] - indices[0] == len(indices) - 1
