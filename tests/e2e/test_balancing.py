"""Requests that begin alike meet in one of two engine cores, whichever API server they come to."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.server import Server, start_server

pytestmark = pytest.mark.slow

NUM_PREFIXES, NUM_EACH = 16, 8
PREFIX_LEN, TAIL_LEN = 160, 8
FLAGS = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "256M", "--api-server-count", "2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Server]:
    """The embedded model on two ranks."""
    with start_server(*FLAGS, "-dp", "2") as server:
        yield server


def prompts() -> list[list[int]]:
    """Token ids, shuffled."""
    generator = random.Random(4)

    def tokens(count: int) -> list[int]:
        return generator.choices(range(100, 40_000), k=count)

    prefixes = [tokens(PREFIX_LEN) for _ in range(NUM_PREFIXES)]
    found = [prefix + tokens(TAIL_LEN) for prefix in prefixes for _ in range(NUM_EACH)]
    generator.shuffle(found)
    return found


def hit_rate(server: Server) -> float:
    """Of the prefix cache, over all prompts of `prompts`, of which four are open at any time."""
    names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
    before = [server.metric(name) for name in names]
    with ThreadPoolExecutor(4) as clients:
        list(clients.map(lambda prompt: server.text(prompt, max_tokens=2), prompts()))
    hits, queries = (server.metric(name) - old for name, old in zip(names, before, strict=True))
    assert queries == NUM_PREFIXES * NUM_EACH * (PREFIX_LEN + TAIL_LEN)
    return hits / queries


def test_two_ranks_find_nearly_as_much_as_one(ranks: Server, smollm_server: Server) -> None:
    """And both get about as many requests. The bounds leave room for what a busy machine makes of the order."""
    alone = hit_rate(smollm_server)
    assert alone > 0.75
    assert hit_rate(ranks) > 0.95 * alone
    served = [ranks.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    assert max(served) < 1.4 * sum(served) / 2


def test_choices_of_one_prompt_stay_together(ranks: Server) -> None:
    before = [ranks.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    assert len(ranks.complete(list(range(700, 800)), n=4, max_tokens=2)["choices"]) == 4
    after = [ranks.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    assert sorted(late - early for early, late in zip(before, after, strict=True)) == [0, 4]


def test_prompts_shorter_than_a_block_go_to_both(ranks: Server) -> None:
    before = [ranks.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    for number in range(20):
        ranks.text([number + 7], max_tokens=1)
    after = [ranks.metric("request_success_total", engine=engine) for engine in ("0", "1")]
    assert min(late - early for early, late in zip(before, after, strict=True)) >= 5


def test_a_pinned_rank_keeps_what_is_sent_there(ranks: Server) -> None:
    """A prompt that was pinned is found by those like it that are not."""
    prompt = random.Random(9).choices(range(100, 40_000), k=200)
    for rank in ("0", "1"):
        body = {"prompt": [int(rank) + 50, *prompt], "max_tokens": 2}
        pinned = ranks.http.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})
        assert pinned.status_code == 200
        usage = ranks.complete(body["prompt"], max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 192
