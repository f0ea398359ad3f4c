"""Which encoder outputs are kept, and who gives way."""

import hashlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tokenmill_engine.kv_cache.encoder_cache import EncoderCache, EncoderKey


def key(content: str, num_tokens: int) -> EncoderKey:
    return EncoderKey((hashlib.sha256(content.encode()).digest(), num_tokens))


CAT, DOG, COW = key("cat", 4), key("dog", 4), key("cow", 4)


def test_what_nobody_holds_gives_way_oldest_first() -> None:
    cache = EncoderCache(8)
    cat, dog = cache.add(1, CAT, 4), cache.add(2, DOG, 4)
    cache.release(1)
    cache.release(2)
    cache.hold(3, CAT)
    cache.release(3)
    cow = cache.add(4, COW, 4)
    assert cache.take_evicted() == [dog]
    assert [cache.find(each) for each in (CAT, DOG, COW)] == [cat, None, cow]
    assert cache.take_evicted() == []
    cache.check_invariants()


def test_what_is_held_stays() -> None:
    cache = EncoderCache(8)
    cache.add(1, CAT, 4)
    cache.hold(2, CAT)
    cache.add(1, DOG, 4)
    cache.release(1, keep=DOG)
    with pytest.raises(ValueError, match="4 tokens cannot be added to 8 held of 8"):
        cache.add(3, COW, 4)
    assert cache.num_held == 8
    assert cache.num_held_without({2}) == 4
    assert not cache.is_held(CAT, leaving={2})
    cache.release(2)
    cache.add(3, COW, 4)
    assert cache.find(CAT) is None
    cache.check_invariants()


def test_an_id_is_never_used_again() -> None:
    cache = EncoderCache(4)
    first = cache.add(1, CAT, 4)
    cache.release(1)
    cache.add(1, DOG, 4)
    cache.release(1)
    assert cache.add(1, CAT, 4) > first


def test_what_is_lost_is_gone_for_all_who_hold_it() -> None:
    cache = EncoderCache(8)
    cat, dog = cache.add(1, CAT, 4), cache.add(1, DOG, 4)
    cache.hold(2, CAT)
    cache.forget([cat, 77])
    cache.check_invariants()
    assert cache.find(CAT) is None
    assert cache.take_evicted() == [cat, 77]
    assert cache.holds() == [(1, DOG)]
    cache.forget([dog])
    assert cache.num_tokens == cache.num_held == 0
    assert cache.add(2, CAT, 4) not in (cat, dog)
    cache.release(1)
    cache.check_invariants()


SIZES = {f"image {size}.{index}": size for size in (1, 2, 3, 5) for index in range(3)}
OWNERS = st.integers(0, 3)
CONTENTS = st.sampled_from(sorted(SIZES))


class CacheMachine(RuleBasedStateMachine):
    """Against a model: a worker that keeps what it was told to encode until it is told to free it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(7)
        self.worker: dict[int, str] = {}
        self.held: dict[int, set[str]] = {}

    @rule(owner=OWNERS, content=CONTENTS)
    def look(self, owner: int, content: str) -> None:
        size = SIZES[content]
        wanted = key(content, size)
        if self.cache.find(wanted) is not None:
            assert self.worker[self.cache.hold(owner, wanted)] == content
        else:
            others = {each for contents in self.held.values() for each in contents}
            if sum(SIZES[each] for each in others) + size > 7:
                with pytest.raises(ValueError, match="cannot be added"):
                    self.cache.add(owner, wanted, size)
                return
            entry = self.cache.add(owner, wanted, size)
            for freed in self.cache.take_evicted():
                self.worker.pop(freed, None)
            assert entry not in self.worker
            self.worker[entry] = content
        self.held.setdefault(owner, set()).add(content)

    @rule(owner=OWNERS, data=st.data())
    def release(self, owner: int, data: Any) -> None:
        contents = sorted(self.held.pop(owner, ()))
        keep = data.draw(st.none() | st.sampled_from(contents)) if contents else None
        self.cache.release(owner, None if keep is None else key(keep, SIZES[keep]))
        if keep is not None:
            self.held[owner] = {keep}

    @rule(content=CONTENTS)
    def lose(self, content: str) -> None:
        entry = self.cache.find(key(content, SIZES[content]))
        if entry is not None:
            self.cache.forget([entry])
            for contents in self.held.values():
                contents.discard(content)

    @invariant()
    def holds(self) -> None:
        self.cache.check_invariants()
        held = {(owner, content) for owner, contents in self.held.items() for content in contents}
        assert set(self.cache.holds()) == {(owner, key(content, SIZES[content])) for owner, content in held}
        for content, size in SIZES.items():
            entry = self.cache.find(key(content, size))
            assert entry is None or self.worker[entry] == content
        for leaving in ({0}, {1, 2}):
            kept = {content for owner, content in held if owner not in leaving}
            assert self.cache.num_held_without(leaving) == sum(SIZES[content] for content in kept)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=30)
