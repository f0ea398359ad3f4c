import random
from collections import Counter

from tokenmill_server.balancing.home_rank import home_rank, share_of

NAMES = [random.Random(seed).getrandbits(64) for seed in range(4000)]


def test_homes_are_spread_evenly() -> None:
    for count in (2, 3, 4, 8):
        homes = Counter(home_rank(name, range(count)) for name in NAMES)
        assert len(homes) == count
        assert max(homes.values()) < 1.15 * len(NAMES) / count


def test_only_the_names_of_a_rank_that_leaves_move() -> None:
    moved = [(home_rank(name, range(4)), home_rank(name, (0, 1, 3))) for name in NAMES]
    assert all(before == after for before, after in moved if before != 2)
    assert {after for before, after in moved if before == 2} == {0, 1, 3}


def test_the_order_of_ranks_does_not_matter() -> None:
    assert all(home_rank(name, (3, 0, 2, 1)) == home_rank(name, range(4)) for name in NAMES)


def test_shares_are_spread_evenly_and_independent_of_homes() -> None:
    for rank in range(4):
        shares = [share_of(name) for name in NAMES if home_rank(name, range(4)) == rank]
        assert all(0.0 <= share <= 1.0 for share in shares)
        assert 0.45 < sum(shares) / len(shares) < 0.55
