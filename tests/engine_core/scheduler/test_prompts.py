"""Choices of one prompt share its array and the names of its blocks."""

import numpy as np

from tests.support.scheduling import make_request
from tokenmill_engine.block_hash import CacheKey, hash_full_blocks
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.prompts import LastPrompt


def request(number: int, prompt: list[int], salt: str | None = None) -> Request:
    made = make_request(number)
    made.prompt_token_ids = np.array(prompt, dtype=np.int32)
    made.cache_key = CacheKey(cache_salt=salt)
    return made


def test_siblings_share() -> None:
    last = LastPrompt(4, hash_blocks=True)
    siblings = [request(number, list(range(10))) for number in range(3)]
    for sibling in siblings:
        last.share_with(sibling)
    first = siblings[0]
    assert first.block_hashes == hash_full_blocks(first.prompt_token_ids, 4, CacheKey())
    assert len(first.block_hashes) == 2
    for sibling in siblings[1:]:
        assert sibling.prompt_token_ids is first.prompt_token_ids
        assert [a is b for a, b in zip(sibling.block_hashes, first.block_hashes, strict=True)] == [True, True]
    siblings[1].block_hashes.append(first.block_hashes[0])
    again = request(9, list(range(10)))
    last.share_with(again)
    assert len(first.block_hashes) == len(again.block_hashes) == 2


def test_other_prompts_and_other_salts_do_not() -> None:
    last = LastPrompt(4, hash_blocks=True)
    requests = [
        request(1, [1] * 8),
        request(2, [1] * 8, "salt"),
        request(3, [1] * 7 + [2], "salt"),
        request(4, [1] * 3),
    ]
    for each in requests:
        last.share_with(each)
        assert each.block_hashes == hash_full_blocks(each.prompt_token_ids, 4, each.cache_key)
    assert len({id(each.prompt_token_ids) for each in requests}) == 4


def test_without_prefix_caching_nothing_is_named() -> None:
    last = LastPrompt(4, hash_blocks=False)
    both = [request(number, [1] * 8) for number in range(2)]
    for each in both:
        last.share_with(each)
        assert each.block_hashes == []
    assert both[1].prompt_token_ids is both[0].prompt_token_ids
