"""Block names: equal exactly when everything that the keys and values depend on is equal."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.block_hash import BlockHash, CacheKey, MediaSpan, hash_block, hash_full_blocks, media_spans
from tokenmill_engine.messages import MediaItem

TOKENS = np.arange(40, dtype=np.int32)
PLAIN = CacheKey()


def names(tokens: np.ndarray = TOKENS, key: CacheKey = PLAIN) -> list[BlockHash]:
    return hash_full_blocks(tokens, 16, key)


def test_only_full_blocks_have_names_of_16_bytes() -> None:
    assert [len(block_hash) for block_hash in names()] == [16, 16]
    assert names(TOKENS[:15]) == []
    assert len(names(TOKENS[:16])) == 1


def test_names_are_a_chain_that_can_be_continued_block_by_block() -> None:
    first = hash_block(PLAIN.root(), TOKENS[:16].tobytes())
    assert names() == [first, hash_block(first, TOKENS[16:32].tobytes())]


def test_a_longer_prompt_begins_with_the_names_of_its_prefix() -> None:
    assert names()[:1] == names(TOKENS[:20])


@pytest.mark.parametrize("position", [0, 15, 16, 31])
def test_another_token_changes_its_block_and_all_that_follow(position: int) -> None:
    changed = TOKENS.copy()
    changed[position] += 1
    differs = [before != after for before, after in zip(names(), names(changed), strict=True)]
    assert differs == [position < 16, True]


@pytest.mark.parametrize(
    "key", [CacheKey(cache_salt="a"), CacheKey(cache_salt="b"), CacheKey(lora_id=1), CacheKey(1, "a")]
)
def test_salt_and_adapter_change_every_block(key: CacheKey) -> None:
    assert not set(names()) & set(names(key=key))
    assert names(key=key) == names(key=CacheKey(key.lora_id, key.cache_salt))


def test_salts_do_not_run_into_each_other() -> None:
    roots = [CacheKey(cache_salt=salt).root() for salt in ("", "a", "aa", "None")]
    assert len({*roots, PLAIN.root(), CacheKey(lora_id=0).root()}) == 6


def test_media_change_the_blocks_they_lie_in_and_those_after() -> None:
    cat, dog = (CacheKey(media=(MediaSpan(18, 22, content),)) for content in ("cat", "dog"))
    assert names(key=cat)[0] == names()[0]
    assert len({names(key=key)[1] for key in (PLAIN, cat, dog)}) == 3


def test_where_media_begin_matters() -> None:
    early, late = (CacheKey(media=(MediaSpan(start, start + 4, "cat"),)) for start in (18, 19))
    assert names(key=early)[1] != names(key=late)[1]


def test_media_over_two_blocks_change_both() -> None:
    spread = CacheKey(media=(MediaSpan(14, 18, "cat"),))
    assert not set(names()) & set(names(key=spread))


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 60), st.integers(1, 20))
def test_a_block_is_named_by_the_media_in_it(sizes: list[int], start: int, length: int) -> None:
    """Gaps and media in turn; other media further away change nothing."""
    ends = np.cumsum(sizes).tolist()
    spans = [MediaSpan(first, last, str(first)) for first, last in pairwise(ends) if first < last][::2]
    inside = tuple(span for span in spans if span.start < start + length and span.end > start)
    assert CacheKey(media=tuple(spans)).extra(start, start + length) == CacheKey(media=inside).extra(
        start, start + length
    )
    assert bool(CacheKey(media=tuple(spans)).extra(start, start + length)) == bool(inside)


def test_what_decides_the_positions_behind_a_video_is_part_of_its_name() -> None:
    videos = [
        MediaItem("video", b"k" * 32, 0, 8, grid, {}, seconds)
        for grid, seconds in (((2, 4, 4), 0.5), ((2, 4, 4), 1.0), ((2, 2, 8), 0.5))
    ]
    keys = [CacheKey(media=media_spans([video])) for video in videos]
    assert len({tuple(names(key=key)) for key in keys}) == 3
