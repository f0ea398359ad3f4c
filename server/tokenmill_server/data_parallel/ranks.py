"""Sets of data-parallel ranks, in words."""

from collections.abc import Iterable, Sequence


def phrase(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 2 to 5`, `ranks 0, 2 and 5`. There is at least one; they ascend."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"


def without(ranks: Iterable[int], *others: Iterable[int]) -> list[int]:
    """Those of `ranks` that are in none of the `others`, in their order."""
    taken = {rank for other in others for rank in other}
    return [rank for rank in ranks if rank not in taken]
