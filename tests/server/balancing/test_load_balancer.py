import numpy as np
import pytest

from tokenmill_engine.block_hash import CacheKey, hash_full_blocks, pack_short_names
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import EngineLoad
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.balancing.prompt_blocks import PromptBlocks

BLOCK_SIZE = 16
SHORT = PromptBlocks(num_tokens=8)


def prompt_of(balancer: LoadBalancer, first: int, num_tokens: int = 64, tail: int = 0) -> PromptBlocks:
    """A prompt whose first token is `first`, so that no block is that of another; `tail` own tokens follow."""
    return balancer.describe([first, *range(100, 99 + num_tokens), *range(tail, 2 * tail)])


def balancer_of(num_engines: int, **options: int) -> LoadBalancer:
    return LoadBalancer(num_engines, block_size=BLOCK_SIZE, **options)


def send(balancer: LoadBalancer, prompt: PromptBlocks) -> int:
    engine = balancer.choose(prompt)
    balancer.sent(engine, prompt)
    return engine


def load_of(running: int, waiting: int = 0, **fields: int) -> EngineLoad:
    return EngineLoad(running, waiting, **fields)


# --- load -------------------------------------------------------------------------------------------------------------


def test_idle_engines_take_turns() -> None:
    balancer = LoadBalancer(3)
    assert [balancer.choose(SHORT) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded_engine_is_chosen() -> None:
    balancer = LoadBalancer(3)
    for engine, (running, waiting) in enumerate([(4, 1), (2, 0), (3, 9)]):
        balancer.reported(engine, load_of(running, waiting))
    assert [balancer.choose(SHORT) for _ in range(3)] == [1, 1, 1]


def test_queued_prompt_tokens_are_load() -> None:
    balancer = LoadBalancer(2)
    balancer.reported(0, load_of(1, 0, num_waiting_tokens=4000))
    balancer.reported(1, load_of(3))
    assert balancer.choose(SHORT) == 1


def test_what_was_sent_counts_until_the_engine_counts_it() -> None:
    """A report that was made before a request came must not hide it."""
    balancer = LoadBalancer(2)
    for _ in range(4):
        balancer.sent(0, SHORT)
    balancer.reported(0, load_of(0, num_received=0))
    balancer.reported(1, load_of(2, num_received=0))
    assert balancer.choose(SHORT) == 1
    balancer.reported(0, load_of(1, num_received=4))
    assert balancer.choose(SHORT) == 0


def test_short_prompts_spread_evenly() -> None:
    balancer = balancer_of(4)
    engines = [send(balancer, SHORT) for _ in range(400)]
    assert [engines.count(engine) for engine in range(4)] == [100] * 4


def test_ended_requests_do_not_count() -> None:
    balancer = LoadBalancer(2)
    balancer.sent(0, PromptBlocks(8, num_sequences=2))
    balancer.sent(1, SHORT)
    balancer.reported(0, load_of(0, num_received=2))
    assert balancer.choose(SHORT) == 0


def test_one_engine_needs_no_names() -> None:
    balancer = balancer_of(1)
    prompt = prompt_of(balancer, 1)
    assert prompt.names == ()
    assert send(balancer, prompt) == 0


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_names_are_those_of_the_engine() -> None:
    balancer = balancer_of(2)
    tokens = list(range(3 * BLOCK_SIZE))
    assert len(balancer.describe(tokens).names) == 2, "the last token of a prompt is always computed"
    assert balancer.describe(tokens, cache_salt="a").names != balancer.describe(tokens).names
    assert balancer.describe(tokens, reads_cache=False).names == ()


def test_a_prompt_goes_where_its_prefix_was_sent() -> None:
    for first in range(20):
        balancer = balancer_of(4)
        assert len({send(balancer, prompt_of(balancer, first, 1024, tail=40 + turn)) for turn in range(8)}) == 1


def test_a_prompt_goes_where_its_prefix_is_stored_and_no_more_once_it_is_forgotten() -> None:
    tokens = list(range(20 * BLOCK_SIZE))
    names = pack_short_names(hash_full_blocks(np.array(tokens, dtype=np.int32), BLOCK_SIZE, CacheKey()))
    chosen = []
    for holder in range(4):
        balancer = balancer_of(4)
        prompt = balancer.describe(tokens)
        home = balancer.choose(prompt)
        balancer.blocks_changed(holder, names, b"", is_snapshot=True)
        chosen.append(balancer.choose(prompt))
        balancer.blocks_changed(holder, b"", names)
        assert balancer.choose(prompt) == home
    assert chosen == [0, 1, 2, 3]


def test_api_servers_agree_about_new_prefixes() -> None:
    first, second = balancer_of(4), balancer_of(4)
    for _ in range(5):
        send(second, SHORT)  # they have done different things before
    engines = [first.choose(prompt_of(first, number)) for number in range(40)]
    assert engines == [second.choose(prompt_of(second, number)) for number in range(40)]
    assert set(engines) == {0, 1, 2, 3}


def test_a_popular_prefix_spreads_once_its_rank_has_much_more_to_do() -> None:
    balancer = balancer_of(4)
    engines = [send(balancer, prompt_of(balancer, 1, 1024, tail=100 + number)) for number in range(400)]
    counts = [engines.count(engine) for engine in range(4)]
    assert min(counts) > 0
    assert max(counts) <= 1.4 * 100


def test_cached_tokens_outweigh_a_few_running_requests() -> None:
    balancer = balancer_of(2)
    prompt = prompt_of(balancer, 1, 2048)
    holder = send(balancer, prompt)
    balancer.reported(holder, load_of(6, num_received=1))
    assert balancer.choose(prompt) == holder
    balancer.reported(holder, load_of(60, num_received=1, num_waiting_tokens=60_000))
    assert balancer.choose(prompt) != holder


# --- room -------------------------------------------------------------------------------------------------------------


def test_a_full_rank_is_left_for_one_with_room() -> None:
    """Whatever it has cached: a request would wait there."""
    balancer = balancer_of(2, max_num_seqs=4)
    engines = [send(balancer, prompt_of(balancer, 1, 4096)) for _ in range(8)]
    assert sorted(engines) == [0] * 4 + [1] * 4


def test_other_api_servers_send_as_much() -> None:
    """Four of them fill two ranks of four with one request to each rank, though none hears of the others."""
    balancers = [balancer_of(2, num_api_servers=4, max_num_seqs=4) for _ in range(4)]
    engines = [send(balancer, prompt_of(balancer, 1, 4096)) for balancer in balancers for _ in range(2)]
    assert sorted(engines) == [0] * 4 + [1] * 4


def test_a_prompt_that_does_not_fit_into_free_blocks_goes_elsewhere() -> None:
    balancer = balancer_of(2)
    prompt = prompt_of(balancer, 1, 1000)
    holder = balancer.choose(prompt)
    for engine in range(2):
        balancer.joined(engine, kv_cache_tokens=10_000)
    balancer.reported(holder, EngineLoad(2, 0, kv_usage=0.95))
    balancer.reported(1 - holder, EngineLoad(9, 0, kv_usage=0.5))
    assert balancer.choose(prompt) == 1 - holder


def test_all_choices_of_a_prompt_need_room() -> None:
    balancer = balancer_of(2, max_num_seqs=8)
    balancer.reported(0, load_of(2))
    balancer.reported(1, load_of(4))
    assert balancer.choose(PromptBlocks(8, num_sequences=6)) == 0
    balancer.reported(0, load_of(3))
    assert balancer.choose(PromptBlocks(8, num_sequences=4)) == 0


# --- ranks that come and go -------------------------------------------------------------------------------------------


def test_a_pinned_rank_is_used_whatever_its_load() -> None:
    balancer = LoadBalancer(2)
    balancer.reported(1, load_of(100, 100))
    assert balancer.choose(SHORT, pinned=1) == 1
    for rank in (-1, 2):
        with pytest.raises(InvalidRequestError, match="ranks are 0 to 1"):
            balancer.choose(SHORT, pinned=rank)


def test_a_lost_rank_gets_nothing_until_it_joins_again_with_an_empty_cache() -> None:
    balancer = balancer_of(3)
    prompt = prompt_of(balancer, 1, 1024)
    holder = send(balancer, prompt)
    balancer.lost(holder)
    assert holder not in {balancer.choose(prompt_of(balancer, number)) for number in range(30)}
    other = send(balancer, prompt)
    balancer.joined(holder)
    assert balancer.choose(prompt) == other, "what the lost one had cached is gone"
    assert holder in {balancer.choose(prompt_of(balancer, number)) for number in range(30)}


def test_the_home_of_other_prefixes_does_not_move_when_a_rank_is_lost() -> None:
    balancer = balancer_of(4)
    prompts = [prompt_of(balancer, number) for number in range(60)]
    before = [balancer.choose(prompt) for prompt in prompts]
    balancer.lost(2)
    after = [balancer.choose(prompt) for prompt in prompts]
    assert [engine for engine in before if engine != 2] == [
        new for old, new in zip(before, after, strict=True) if old != 2
    ]


def test_requests_that_a_lost_rank_took_with_it_are_not_waited_for() -> None:
    balancer = LoadBalancer(2)
    balancer.sent(0, PromptBlocks(8, num_sequences=50))
    balancer.lost(0)
    balancer.joined(0)
    balancer.sent(1, SHORT)
    assert balancer.choose(SHORT) == 0


def test_a_stalled_rank_is_chosen_only_if_all_are() -> None:
    balancer = LoadBalancer(2)
    balancer.set_stalled(0, True)
    assert {balancer.choose(SHORT) for _ in range(4)} == {1}
    balancer.set_stalled(1, True)
    assert {balancer.choose(SHORT) for _ in range(4)} == {0, 1}
    balancer.set_stalled(0, False)
    assert {balancer.choose(SHORT) for _ in range(4)} == {0}


def test_there_is_a_choice_though_all_are_lost() -> None:
    balancer = LoadBalancer(2)
    balancer.lost(0)
    balancer.lost(1)
    assert balancer.choose(SHORT) in (0, 1)
