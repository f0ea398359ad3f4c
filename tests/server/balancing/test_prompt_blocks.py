import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tokenmill_engine.block_hash import BlockHash, CacheKey, hash_block, hash_full_blocks, media_spans, short_name
from tokenmill_engine.messages import MediaItem
from tokenmill_server.balancing import prompt_blocks
from tokenmill_server.balancing.prompt_blocks import BlockNames


def test_names_are_those_that_engines_publish() -> None:
    tokens = list(range(7, 7 + 83))
    for salt in (None, "a"):
        expected = hash_full_blocks(np.array(tokens, dtype=np.int32), 16, CacheKey(cache_salt=salt))
        assert BlockNames(16).of(tokens, salt) == tuple(short_name(name) for name in expected)


def test_the_last_token_is_in_no_block() -> None:
    assert [len(BlockNames(16).of(list(range(length)))) for length in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 1, 1, 2]


def test_blocks_with_images_are_named_by_them() -> None:
    tokens = [5] * 83
    items = [MediaItem("image", bytes([index]) * 32, 10 + 30 * index, 20, (1, 8, 10), {}) for index in range(2)]
    expected = hash_full_blocks(np.array(tokens, dtype=np.int32), 16, CacheKey(media=media_spans(items)))
    assert BlockNames(16).of(tokens, media=items) == tuple(short_name(name) for name in expected)
    swapped = [replace(item, key=other.key) for item, other in zip(items, reversed(items), strict=True)]
    assert not set(BlockNames(16).of(tokens, media=items)) & set(BlockNames(16).of(tokens, media=swapped))


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=9), st.sampled_from([None, "a"]), st.booleans()), max_size=8
    )
)
def test_names_do_not_depend_on_the_prompt_before(prompts: list[tuple[list[int], str | None, bool]]) -> None:
    names = BlockNames(2)
    image = MediaItem("image", b"k" * 32, 1, 3, (1, 2, 2), {})
    for tokens, salt, has_image in prompts:
        media = [image] if has_image else []
        assert names.of(tokens, salt, media) == BlockNames(2).of(tokens, salt, media)


def test_what_a_prompt_shares_with_the_one_before_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def spy(parent: BlockHash, tokens: bytes, extra: bytes = b"") -> BlockHash:
        hashed.append(tokens)
        return hash_block(parent, tokens, extra)

    monkeypatch.setattr(prompt_blocks, "hash_block", spy)
    names, prompt = BlockNames(16), list(range(1600))
    first = names.of([*prompt, 1, 2, 3])
    assert (len(hashed), len(first)) == (100, 100)
    assert names.of([*prompt, 4, *range(20)])[:100] == first
    assert len(hashed) == 101
