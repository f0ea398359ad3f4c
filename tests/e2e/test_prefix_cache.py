"""Prompts that begin alike share what was computed, and never the answer."""

from typing import Any

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.slow

BLOCK = 16


def cached(result: dict[str, Any]) -> int:
    return int(result["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt_of(num_tokens: int, start: int) -> list[int]:
    """Token ids that no other test uses in this order."""
    return [3 + (start + 7 * position) % 400 for position in range(num_tokens)]


def test_whole_blocks_again_and_again(tiny_server: Server) -> None:
    """A prompt of exactly four blocks: its last token is always computed, so at most three blocks are found."""
    prompt = prompt_of(4 * BLOCK, 1)
    results = [tiny_server.complete(prompt, max_tokens=12) for _ in range(3)]
    assert [cached(result) for result in results] == [0, 3 * BLOCK, 3 * BLOCK]
    assert len({result["choices"][0]["text"] for result in results}) == 1
    longer = tiny_server.complete(prompt + prompt_of(BLOCK, 2), max_tokens=12)
    assert cached(longer) >= 3 * BLOCK
    tiny_server.check_idle()
    tiny_server.check_alive()


def test_the_answer_is_found_too(tiny_server: Server) -> None:
    """What was generated is part of the next turn's prompt."""
    prompt = prompt_of(BLOCK, 3)
    result = tiny_server.complete(prompt, max_tokens=3 * BLOCK, ignore_eos=True, return_token_ids=True)
    conversation = prompt + result["choices"][0]["token_ids"]
    assert cached(tiny_server.complete([*conversation, 5, 6], max_tokens=4)) >= 3 * BLOCK


def test_other_salt_other_blocks(tiny_server: Server) -> None:
    prompt = prompt_of(3 * BLOCK, 5)
    salted = [tiny_server.complete(prompt, cache_salt=salt, max_tokens=4) for salt in ("a", "b", "a")]
    assert [cached(result) for result in salted] == [0, 0, 2 * BLOCK]
    assert cached(tiny_server.complete(prompt, max_tokens=4)) == 0


def test_counters_say_what_was_found(tiny_server: Server) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total")
    before = [tiny_server.metric(name) for name in names]
    prompt = prompt_of(2 * BLOCK + 3, 9)
    for _ in range(2):
        tiny_server.complete(prompt, max_tokens=2)
    after = [tiny_server.metric(name) for name in names]
    assert [late - early for early, late in zip(before, after, strict=True)] == [2 * len(prompt), 2 * BLOCK]
