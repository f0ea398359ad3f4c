import numpy as np

from tokenmill_engine.block_hash import CacheKey, hash_full_blocks, short_name
from tokenmill_server.balancing.prompt_blocks import name_blocks


def test_names_are_those_that_engines_publish() -> None:
    tokens = list(range(7, 7 + 83))
    for salt in (None, "a"):
        expected = hash_full_blocks(np.array(tokens, dtype=np.int32), 16, CacheKey(cache_salt=salt))
        assert name_blocks(tokens, 16, salt) == tuple(short_name(name) for name in expected)


def test_the_last_token_is_in_no_block() -> None:
    assert [len(name_blocks(list(range(length)), 16)) for length in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]
