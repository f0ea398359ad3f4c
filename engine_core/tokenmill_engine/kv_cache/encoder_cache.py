"""Which encoder outputs a worker keeps: images that a step looks at, and those that later ones may look at.

An entry is one image's output, of as many tokens as the image has placeholders. Its key names the content, so that
requests share it; its id is never used again, so that a step in flight which has lost it finds nothing under that id
rather than another image. Running requests that have begun an image and not ended it hold its entry. What nobody holds
stays until its place is needed, least recently used first. Knows nothing of tensors, nor of what is in a request.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NewType

EncoderKey = NewType("EncoderKey", tuple[bytes, int])
"""Content and number of tokens."""


@dataclass(slots=True)
class _Entry:
    entry: int
    num_tokens: int
    owners: set[int] = field(default_factory=set)


class EncoderCache:
    """Entries of together at most `capacity` tokens. Owners are request ids."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_tokens = 0
        """Of all entries."""
        self.num_held = 0
        """Tokens of those that somebody holds."""
        self._entries: dict[EncoderKey, _Entry] = {}
        self._idle: OrderedDict[EncoderKey, None] = OrderedDict()
        """Entries that nobody holds, least recently used first."""
        self._held: dict[int, set[EncoderKey]] = {}
        """By owner."""
        self._evicted: list[int] = []
        self._next_entry = 0

    def find(self, key: EncoderKey) -> int | None:
        """The id of the entry with this key, if there is one."""
        found = self._entries.get(key)
        return None if found is None else found.entry

    def is_held(self, key: EncoderKey, leaving: Collection[int] = ()) -> bool:
        """Whether an owner other than those `leaving` holds the entry."""
        found = self._entries.get(key)
        return found is not None and not found.owners <= set(leaving)

    def num_held_without(self, leaving: Collection[int]) -> int:
        """What `num_held` were if the owners `leaving` held nothing."""
        keys = {key for owner in leaving for key in self._held.get(owner, ())}
        return self.num_held - sum(self._entries[key].num_tokens for key in keys if not self.is_held(key, leaving))

    def hold(self, owner: int, key: EncoderKey) -> int:
        """Keep an entry that is here; returns its id. Raises KeyError if it is not."""
        found = self._entries[key]
        if not found.owners:
            del self._idle[key]
            self.num_held += found.num_tokens
        found.owners.add(owner)
        self._held.setdefault(owner, set()).add(key)
        return found.entry

    def add(self, owner: int, key: EncoderKey, num_tokens: int) -> int:
        """A new entry, held by `owner`; others make room for it. Returns its id.

        Raises:
            ValueError: what is held leaves no room, or the key is taken. Nothing has changed then.
        """
        if key in self._entries or self.num_held + num_tokens > self.capacity:
            raise ValueError(
                f"an entry of {num_tokens} tokens cannot be added to {self.num_held} held of {self.capacity}"
            )
        while self.num_tokens + num_tokens > self.capacity:
            oldest = next(iter(self._idle))
            self._remove(oldest)
        self._entries[key] = _Entry(self._next_entry, num_tokens)
        self._next_entry += 1
        self._idle[key] = None
        self.num_tokens += num_tokens
        return self.hold(owner, key)

    def release(self, owner: int, keep: EncoderKey | None = None) -> None:
        """The owner needs none of its entries any more but the one to `keep`, if it holds that."""
        for key in self._held.get(owner, set()) - {keep}:
            self._let_go(owner, key)

    def forget(self, entries: Iterable[int]) -> None:
        """These entries hold nothing: who wants the image has it encoded again. All count as evicted, also those that
        were already: a worker may have them after all."""
        lost = set(entries)
        for key in [key for key, found in self._entries.items() if found.entry in lost]:
            for owner in list(self._entries[key].owners):
                self._let_go(owner, key)
            self._remove(key)
        self._evicted += sorted(lost - set(self._evicted))

    def holds(self) -> list[tuple[int, EncoderKey]]:
        """Who holds what."""
        return [(owner, key) for owner, keys in self._held.items() for key in keys]

    def take_evicted(self) -> list[int]:
        """Ids of the entries that had to make room, or were lost, since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def check_invariants(self) -> None:
        """Raises AssertionError if entries, owners and counts contradict each other."""
        assert 0 <= self.num_held <= self.num_tokens <= self.capacity
        assert self.num_tokens == sum(found.num_tokens for found in self._entries.values())
        assert self.num_held == sum(found.num_tokens for found in self._entries.values() if found.owners)
        assert set(self._idle) == {key for key, found in self._entries.items() if not found.owners}
        assert set(self.holds()) == {(owner, key) for key, found in self._entries.items() for owner in found.owners}
        assert all(self._held.values())
        ids = [found.entry for found in self._entries.values()]
        assert len(set(ids)) == len(ids)
        assert not set(ids) & set(self._evicted)

    def _let_go(self, owner: int, key: EncoderKey) -> None:
        found, keys = self._entries[key], self._held[owner]
        keys.remove(key)
        if not keys:
            del self._held[owner]
        found.owners.remove(owner)
        if not found.owners:
            self._idle[key] = None
            self.num_held -= found.num_tokens

    def _remove(self, key: EncoderKey) -> None:
        found = self._entries.pop(key)
        self.num_tokens -= found.num_tokens
        self._evicted.append(found.entry)
        del self._idle[key]
