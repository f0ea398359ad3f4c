"""Chooses the engine core for a request: where most of its prompt is cached, unless that rank has too much to do.

Every API server has a balancer of its own. What they know of each other comes from the engines: their load after each
step and the blocks that their prefix caches gain and lose. A rank costs a request, in prompt tokens:

* what it has to compute of the prompt: the tokens that are not cached there, nor expected to be soon;
* as much again for the parts that have their home elsewhere. The part that no rank has, if it is most of the prompt,
  and the part that this rank lacks and another has, each have one rank as home, by hashing: so all API servers send
  new prefixes, and second copies of popular ones, to the same ranks;
* its backlog, the work that waits and runs there, beyond a limit: what is usual among the ranks, 10 to 30 % more, and
  two prompts;
* for prompts of a block and more, the work that was sent there lately, beyond a limit: what is usual, 3 to 10 % more,
  one prompt and half a usual backlog. This keeps shares even while little waits, and costs at most one prompt.

How many percent are tolerated is the prefix's own, by hashing too: so all API servers let the same prefixes go first.
The cheapest rank wins, of equal ones the least loaded, then they take turns. Ranks that are full come last: where all
`max_num_seqs` are taken, or the prompt does not fit into the free KV blocks, it would wait. Whatever the engines have
not counted yet, every API server is taken to have sent as much of it as this one.
"""

import sys
from collections.abc import Sequence

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import EngineLoad, MediaItem
from tokenmill_server.balancing.cached_blocks import CachedBlocks
from tokenmill_server.balancing.home_rank import home_rank, share_of
from tokenmill_server.balancing.prompt_blocks import BlockNames, PromptBlocks
from tokenmill_server.balancing.rank_load import RankLoad, TypicalRequest

RANK_HEADER = "X-data-parallel-rank"
"""Of a request that goes to one engine core, whatever its load."""

_SEQUENCE_TOKENS, _CONTEXT_SHARE = 32, 1 / 8
"""Decoding one sequence to its end counts as so many prompt tokens, and this share of its prompt's length: every
token reads all of the context."""
_BACKLOG_TOLERANCE, _RECENT_TOLERANCE = 0.3, 0.1
"""What the backlog of a rank, and the work sent there lately, may have beyond the usual at most. Each prefix tolerates
a share of it, from a third on."""
_PULL = 0.25
"""What is usual among ranks lies so far from their mean towards the least loaded one: else a rank could stay without
work while each of many others has a little of its share."""
_RECENT_REQUESTS = 256
"""Prompts per rank that count as sent lately."""


class _Rank:
    """What one API server knows of an engine core."""

    __slots__ = ("blocks", "is_lost", "is_stalled", "kv_tokens", "load", "recent_tokens")

    def __init__(self) -> None:
        self.load = RankLoad()
        self.blocks = CachedBlocks()
        self.recent_tokens = 0.0
        """Work sent there lately by this API server."""
        self.kv_tokens: int | None = None
        """Tokens that the KV cache holds."""
        self.is_lost = False
        self.is_stalled = False


class LoadBalancer:
    """Knows every engine core's load and cached blocks as seen from one API server.

    `block_size` None: prefixes are not cached, so nobody asks where. With one engine nothing is estimated nor hashed.
    """

    def __init__(
        self,
        num_engines: int,
        num_api_servers: int = 1,
        block_size: int | None = None,
        max_num_seqs: int = sys.maxsize,
    ) -> None:
        self._ranks = [_Rank() for _ in range(num_engines)]
        self._num_api_servers = num_api_servers
        self._block_size = block_size if num_engines > 1 else None
        self._names = None if self._block_size is None else BlockNames(self._block_size)
        self._max_num_seqs = max_num_seqs
        self._typical = TypicalRequest()
        self._next = 0

    # --- requests -------------------------------------------------------------------------------------------------

    def describe(
        self,
        token_ids: Sequence[int],
        num_sequences: int = 1,
        cache_salt: str | None = None,
        reads_cache: bool = True,
        media: Sequence[MediaItem] = (),
    ) -> PromptBlocks:
        """What `choose` and `sent` want to know of a prompt."""
        if self._names is None or not reads_cache:
            return PromptBlocks(len(token_ids), num_sequences)
        return PromptBlocks(len(token_ids), num_sequences, self._names.of(token_ids, cache_salt, media))

    def choose(self, prompt: PromptBlocks, pinned: int | None = None) -> int:
        """The engine for a prompt, or `pinned` itself. If all are lost, one of them.

        Raises InvalidRequestError if there is no engine `pinned`.
        """
        count = len(self._ranks)
        if pinned is not None:
            if not 0 <= pinned < count:
                raise InvalidRequestError(
                    f"there is no data-parallel rank {pinned}; ranks are 0 to {count - 1}", RANK_HEADER
                )
            return pinned
        if count == 1:
            return 0
        best = self._cheapest(prompt, self._in_rotation())
        self._next = (best + 1) % count
        return best

    def sent(self, engine: int, prompt: PromptBlocks) -> None:
        """The sequences of a prompt were sent to `engine`."""
        rank = self._ranks[engine]
        if len(self._ranks) == 1:
            return
        num_missing = self._num_missing(rank, prompt)
        rank.load.sent(num_missing, prompt.num_sequences)
        rank.blocks.expect(prompt.names)
        self._typical.observe(prompt.num_tokens, num_missing)
        decay = 1.0 - 1.0 / (_RECENT_REQUESTS * len(self._ranks))
        for each in self._ranks:
            each.recent_tokens *= decay
        rank.recent_tokens += num_missing + prompt.num_sequences * _decode_tokens(prompt.num_tokens)

    # --- engines --------------------------------------------------------------------------------------------------

    def reported(self, engine: int, load: EngineLoad) -> None:
        """`engine` said how much it has to do. With one alone there is nothing to choose."""
        if len(self._ranks) > 1:
            self._ranks[engine].load.report(load)

    def blocks_changed(self, engine: int, stored: bytes, removed: bytes, is_snapshot: bool = False) -> None:
        """`engine` said what its prefix cache has gained and lost; a snapshot is all that it has. Names are uint64."""
        blocks = self._ranks[engine].blocks
        names = memoryview(stored).cast("Q")
        if is_snapshot:
            blocks.replace(names)
        else:
            blocks.store(names)
        if removed:
            blocks.remove(memoryview(removed).cast("Q").tolist())

    def lost(self, engine: int) -> None:
        """`engine` is gone: it is not chosen, and what was known of it is forgotten."""
        rank = self._ranks[engine]
        rank.is_lost, rank.is_stalled = True, False
        rank.load.forget()
        rank.blocks = CachedBlocks()

    def joined(self, engine: int, kv_cache_tokens: int | None = None) -> None:
        """`engine` takes requests, for the first time or again; its KV cache holds `kv_cache_tokens`."""
        rank = self._ranks[engine]
        others = [each.recent_tokens for each in self._ranks if each is not rank and not each.is_lost]
        rank.is_lost, rank.kv_tokens = False, kv_cache_tokens
        rank.recent_tokens = sum(others) / len(others) if others else 0.0

    def set_stalled(self, engine: int, stalled: bool) -> None:
        """A stalled engine is chosen only if all that are not lost are stalled."""
        self._ranks[engine].is_stalled = stalled

    def takes_requests(self, engine: int) -> bool:
        """Whether `engine` is neither lost nor stalled."""
        rank = self._ranks[engine]
        return not (rank.is_lost or rank.is_stalled)

    # --- the choice -----------------------------------------------------------------------------------------------

    def _in_rotation(self) -> list[int]:
        """Engines that may be chosen, the one whose turn it is first."""
        count = len(self._ranks)
        order = [(self._next + offset) % count for offset in range(count)]
        alive = [engine for engine in order if not self._ranks[engine].is_lost] or order
        return [engine for engine in alive if not self._ranks[engine].is_stalled] or alive

    def _cheapest(self, prompt: PromptBlocks, engines: list[int]) -> int:
        block_size = self._block_size or 0
        num_cached = {engine: self._ranks[engine].blocks.count_leading(prompt.names) for engine in engines}
        strays = self._stray_tokens(prompt, num_cached)
        engines = [each for each in engines if self._has_room(self._ranks[each], prompt, num_cached[each])] or engines
        shallowest = min(num_cached.values())
        loyalty = (1 + 2 * share_of(prompt.names[shallowest])) / 3 if shallowest < len(prompt.names) else 0.0
        backlogs = {engine: self._backlog(self._ranks[engine]) for engine in engines}
        recents = {engine: self._ranks[engine].recent_tokens for engine in engines}
        backlog_limit = _usual(backlogs) * (1.0 + _BACKLOG_TOLERANCE * loyalty) + 2 * prompt.num_tokens
        recent_limit = _usual(recents) * (1.0 + _RECENT_TOLERANCE * loyalty) + prompt.num_tokens + _usual(backlogs) / 2

        def cost(engine: int) -> tuple[float, float]:
            num_missing = prompt.num_tokens - num_cached[engine] * block_size
            overload = max(0.0, backlogs[engine] - backlog_limit)
            uneven = min(max(0.0, recents[engine] - recent_limit), len(prompt.names) * block_size)
            return num_missing + strays[engine] + overload + uneven, backlogs[engine]

        return min(engines, key=cost)

    def _stray_tokens(self, prompt: PromptBlocks, num_cached: dict[int, int]) -> dict[int, int]:
        """By engine, tokens of the prompt's parts that it lacks and that have their home elsewhere."""
        names, block_size = prompt.names, self._block_size or 0
        shallowest, deepest = min(num_cached.values()), max(num_cached.values())
        strays = dict.fromkeys(num_cached, 0)
        if 2 * deepest < len(names):
            home = home_rank(names[deepest], num_cached)
            for engine in num_cached:
                strays[engine] += (len(names) - deepest) * block_size * (engine != home)
        if shallowest < deepest:
            home = home_rank(names[shallowest], [each for each, count in num_cached.items() if count == shallowest])
            for engine, count in num_cached.items():
                strays[engine] += (deepest - count) * block_size * (engine != home)
        return strays

    def _has_room(self, rank: _Rank, prompt: PromptBlocks, num_cached: int) -> bool:
        """Whether the prompt's sequences would be admitted at once."""
        load, num_senders = rank.load, self._num_api_servers
        if load.num_sequences(num_senders) + num_senders * prompt.num_sequences > self._max_num_seqs:
            return False
        if rank.kv_tokens is None:
            return True
        num_held = rank.kv_tokens * load.reported.kv_usage
        num_free = rank.kv_tokens - num_held - load.num_prompt_tokens(num_senders, self._typical)
        return prompt.num_tokens - num_cached * (self._block_size or 0) <= num_free

    def _num_missing(self, rank: _Rank, prompt: PromptBlocks) -> int:
        """Tokens of the prompt that the rank would have to compute."""
        return prompt.num_tokens - rank.blocks.count_leading(prompt.names) * (self._block_size or 0)

    def _backlog(self, rank: _Rank) -> float:
        """Work that waits and runs there. That all API servers have sent as much as this one since the report keeps
        them from rushing together to the rank that reported least."""
        num_sequences = rank.load.num_sequences(self._num_api_servers)
        decode_tokens = num_sequences * _decode_tokens(self._typical.prompt_tokens)
        return rank.load.num_prompt_tokens(self._num_api_servers, self._typical) + decode_tokens


def _decode_tokens(num_prompt_tokens: float) -> float:
    """Prompt tokens that the decoding of one sequence counts as."""
    return _SEQUENCE_TOKENS + _CONTEXT_SHARE * num_prompt_tokens


def _usual(loads: dict[int, float]) -> float:
    """Near the mean of the ranks' loads."""
    return (1.0 - _PULL) * sum(loads.values()) / len(loads) + _PULL * min(loads.values())


def make_balancer(config: EngineConfig, num_api_servers: int = 1) -> LoadBalancer:
    """The balancer of one of `num_api_servers` API servers."""
    block_size = config.cache.block_size if config.cache.enable_prefix_caching else None
    return LoadBalancer(config.data_parallel_size, num_api_servers, block_size, config.scheduler.max_num_seqs)
