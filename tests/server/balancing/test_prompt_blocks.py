import numpy as np
from msgspec.structs import replace

from tokenmill_engine.block_hash import CacheKey, hash_full_blocks, media_spans, short_name
from tokenmill_engine.messages import MediaItem
from tokenmill_server.balancing.prompt_blocks import name_blocks


def test_names_are_those_that_engines_publish() -> None:
    tokens = list(range(7, 7 + 83))
    for salt in (None, "a"):
        expected = hash_full_blocks(np.array(tokens, dtype=np.int32), 16, CacheKey(cache_salt=salt))
        assert name_blocks(tokens, 16, salt) == tuple(short_name(name) for name in expected)


def test_the_last_token_is_in_no_block() -> None:
    assert [len(name_blocks(list(range(length)), 16)) for length in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]


def test_blocks_with_images_are_named_by_them() -> None:
    tokens = [5] * 83
    items = [MediaItem("image", bytes([index]) * 32, 10 + 30 * index, 20, (1, 8, 10), {}) for index in range(2)]
    expected = hash_full_blocks(np.array(tokens, dtype=np.int32), 16, CacheKey(media=media_spans(items)))
    assert name_blocks(tokens, 16, media=items) == tuple(short_name(name) for name in expected)
    swapped = [replace(item, key=other.key) for item, other in zip(items, reversed(items), strict=True)]
    assert not set(name_blocks(tokens, 16, media=items)) & set(name_blocks(tokens, 16, media=swapped))
