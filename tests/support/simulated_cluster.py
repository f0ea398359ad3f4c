"""Data-parallel engine cores behind several API servers, in simulated time: what balancing makes of a load.

Balancers, schedulers, block pools, reports and messages are the real ones. A step takes what a device with known costs
would take; API servers take a fixed time for each request, messages a fixed time on their way.
"""

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tests.support.simulated_device import H100_8B_FLAT, TOKEN, Costs
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.kv_cache.events import BlockJournal
from tokenmill_engine.kv_cache.manager import KVCacheManager
from tokenmill_engine.messages import (
    AddRequest,
    BlockEvents,
    EngineLoad,
    EngineMessage,
    MediaMissing,
    SamplingParams,
    StepOutput,
)
from tokenmill_engine.outputs import StepPlan, StepResult
from tokenmill_engine.reports import Output, Reporter
from tokenmill_engine.request import RequestLimits, build_request
from tokenmill_engine.scheduler.budget import make_budget
from tokenmill_engine.scheduler.cost_model import work_of
from tokenmill_engine.scheduler.packing import pack_outcome
from tokenmill_engine.scheduler.scheduler import Scheduler
from tokenmill_server.balancing.load_balancer import LoadBalancer
from tokenmill_server.balancing.prompt_blocks import PromptBlocks

BLOCK_SIZE = 16
_MAX_MODEL_LEN = 100_000
_DEPTH = 2
"""Steps in the pipeline of an engine core."""


@dataclass(frozen=True)
class Arrival:
    """A request that comes to some API server. Generates exactly `output_len` tokens."""

    time_s: float
    prompt: Sequence[int]
    output_len: int
    next: Callable[[float], "Arrival | None"] | None = None
    """What its client sends next, given when it had the answer."""


@dataclass
class Served:
    """What became of a request."""

    arrival: Arrival
    rank: int
    admitted_s: float = 0.0
    """When the first step began that computes it."""
    finished_s: float = 0.0

    @property
    def wait_s(self) -> float:
        return self.admitted_s - self.arrival.time_s


@dataclass(frozen=True)
class Setting:
    """Sizes, costs and delays."""

    num_ranks: int = 4
    num_api_servers: int = 4
    num_blocks: int = 30_000
    """Of each rank."""
    scheduler: SchedulerConfig = field(
        default_factory=lambda: SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=8192)
    )
    costs: Costs = H100_8B_FLAT
    speeds: tuple[float, ...] = ()
    """Of each rank; 1 if not given."""
    request_s: float = 0.001
    """What an API server takes for a request before it chooses a rank."""
    to_engine_s: float = 0.0002
    to_api_server_s: float = 0.001


class SimulatedRank:
    """One engine core: a real scheduler and prefix cache, and the clock of a device."""

    def __init__(self, rank: int, setting: Setting, clock: Callable[[], float]) -> None:
        sizes = [256 << power for power in range(6) if 256 << power <= setting.scheduler.max_num_batched_tokens]
        journal = BlockJournal()
        kv = KVCacheManager(setting.num_blocks, BLOCK_SIZE, journal=journal)
        self._rank = rank
        self._costs = setting.costs
        self._speed = setting.speeds[rank] if setting.speeds else 1.0
        self._budget = make_budget(setting.scheduler, setting.costs.prefill_costs(sizes))
        self._limits = RequestLimits(min(_MAX_MODEL_LEN, kv.max_tokens), vocab_size=1 << 20, eos_token_ids=(0,))
        self._reporter = Reporter(rank, kv.pool, journal, counts_requests=True, clock=clock)
        self._in_flight: deque[tuple[StepPlan, float, float]] = deque()
        """Steps, what each takes, and when it ends."""
        self._seeds = random.Random(rank)
        self.scheduler = Scheduler(setting.scheduler, self._budget, kv, self._limits.max_model_len, (0,))
        self.inbox: list[AddRequest] = []
        self.is_running = False
        """Whether a step is in flight, so that the inbox has to wait for its end."""
        self.busy_s = 0.0
        self.num_computed_tokens = 0
        for client in range(setting.num_api_servers):
            self._reporter.add_listener(client, 0)

    @property
    def load(self) -> EngineLoad:
        return msgspec.structs.replace(self.scheduler.load, num_waiting_tokens=self.scheduler.num_waiting_tokens)

    def begin_turn(self, now: float) -> tuple[float | None, list[int]]:
        """Take messages in and fill the pipeline. Returns when its oldest step ends, and the admitted requests."""
        for message in self.inbox:
            self._reporter.count_request(message.request_id)
            self.scheduler.add(build_request(message, self._limits, self._seeds))
        self.inbox.clear()
        admitted: list[int] = []
        while len(self._in_flight) < _DEPTH and (decision := self.scheduler.schedule()) is not None:
            plan = self.scheduler.apply(decision)
            seconds = self._costs.seconds(work_of(plan)) / self._speed
            self.busy_s += seconds
            self.num_computed_tokens += plan.num_tokens
            self._in_flight.append(
                (plan, seconds, max(now, self._in_flight[-1][2] if self._in_flight else now) + seconds)
            )
            admitted.extend(start.request_id for start in plan.starts)
        self.is_running = bool(self._in_flight)
        return (self._in_flight[0][2] if self._in_flight else None), admitted

    def end_turn(self) -> list[Output]:
        """Commit the oldest step; returns what API servers are told."""
        plan, seconds, _ = self._in_flight.popleft()
        token_ids = np.where(plan.samples, TOKEN, -1).astype(np.int32)[:, np.newaxis]
        result = StepResult(plan.step, token_ids, plan.samples.astype(np.int32), elapsed_s=seconds)
        outcome = self.scheduler.commit(plan, result)
        self._budget.observe(plan, seconds)
        outputs: list[Output] = list(pack_outcome(outcome, self._rank, self.load, self._reporter.num_received).items())
        self._reporter.report(outputs, self.load)
        return outputs


class Cluster:
    """Ranks and API servers. `balancer` makes the balancer of one API server."""

    def __init__(self, setting: Setting, balancer: Callable[[Setting], LoadBalancer], seed: int = 0) -> None:
        self.setting = setting
        self.now = 0.0
        self.ranks = [SimulatedRank(rank, setting, lambda: self.now) for rank in range(setting.num_ranks)]
        self.balancers = [balancer(setting) for _ in range(setting.num_api_servers)]
        for each, engine in itertools.product(self.balancers, range(setting.num_ranks)):
            each.joined(engine, kv_cache_tokens=setting.num_blocks * BLOCK_SIZE)
        self.served: dict[int, Served] = {}
        self.needless_wait_s = 0.0
        """Sum over requests of the time that they waited while another rank would have admitted them."""
        self._random = random.Random(seed)
        self._free_s = [0.0] * setting.num_api_servers
        """When each API server is done with the requests that have come to it."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._ids = itertools.count()
        self._watched_s = 0.0

    def run(self, arrivals: Iterable[Arrival]) -> "Cluster":
        """Serve `arrivals` and what follows from them to the end."""
        for arrival in arrivals:
            self._at(arrival.time_s, lambda a=arrival: self._arrive(a))  # type: ignore[misc]
        while self._events:
            self.now, _, happen = heapq.heappop(self._events)
            happen()
        return self

    # --- results --------------------------------------------------------------------------------------------------

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in a prefix cache."""
        counters = [rank.scheduler.counters for rank in self.ranks]
        return sum(each.prefix_cache_hits for each in counters) / sum(each.prefix_cache_queries for each in counters)

    @property
    def busiest_by_requests(self) -> float:
        """Requests of the rank that had most of them, as a multiple of the mean."""
        counts = Counter(served.rank for served in self.served.values())
        return max(counts.values()) * len(self.ranks) / len(self.served)

    @property
    def busiest_by_tokens(self) -> float:
        """The same of computed tokens."""
        tokens = [rank.num_computed_tokens for rank in self.ranks]
        return max(tokens) * len(tokens) / sum(tokens)

    def waits_s(self) -> list[float]:
        return [served.wait_s for served in self.served.values()]

    # --- events ---------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happen))

    def _arrive(self, arrival: Arrival) -> None:
        """At any of the API servers, which takes one request after the other."""
        client = self._random.randrange(self.setting.num_api_servers)
        self._free_s[client] = max(self._free_s[client], self.now) + self.setting.request_s
        self._at(self._free_s[client], lambda: self._send(client, arrival))

    def _send(self, client: int, arrival: Arrival) -> None:
        balancer = self.balancers[client]
        prompt: PromptBlocks = balancer.describe(arrival.prompt)
        engine = balancer.choose(prompt)
        balancer.sent(engine, prompt)
        request_id = make_request_id(client, 0, next(self._ids))
        self.served[request_id] = Served(arrival, engine)
        sampling = SamplingParams(max_tokens=arrival.output_len, ignore_eos=True)
        tokens = np.array(arrival.prompt, dtype=np.int32).tobytes()
        message = AddRequest(request_id, "simulated", tokens, sampling, self.now)
        self._at(self.now + self.setting.to_engine_s, lambda: self._deliver(self.ranks[engine], message))

    def _deliver(self, rank: SimulatedRank, message: AddRequest) -> None:
        rank.inbox.append(message)
        if not rank.is_running:
            self._begin_turn(rank)

    def _begin_turn(self, rank: SimulatedRank) -> None:
        end_s, admitted = rank.begin_turn(self.now)
        for request_id in admitted:
            self.served[request_id].admitted_s = self.served[request_id].admitted_s or self.now
        if end_s is not None:
            self._at(end_s, lambda: self._end_turn(rank))

    def _end_turn(self, rank: SimulatedRank) -> None:
        self._watch()
        for client, message in rank.end_turn():
            self._at(self.now + self.setting.to_api_server_s, lambda c=client, m=message: self._hear(c, m))  # type: ignore[misc]
        self._begin_turn(rank)

    def _watch(self) -> None:
        loads = [rank.scheduler.load for rank in self.ranks]
        limit = self.setting.scheduler.max_num_seqs
        if any(load.num_waiting == 0 and load.num_running < limit for load in loads):
            self.needless_wait_s += (self.now - self._watched_s) * sum(load.num_waiting for load in loads)
        self._watched_s = self.now

    def _hear(self, client: int, message: EngineMessage) -> None:
        balancer = self.balancers[client]
        if isinstance(message, BlockEvents):
            balancer.blocks_changed(message.engine, message.stored, message.removed, message.is_snapshot)
            return
        assert not isinstance(message, MediaMissing)
        balancer.reported(message.engine, message.load)
        if isinstance(message, StepOutput):
            request_ids = memoryview(message.request_ids).cast("q").tolist()
            for finish in message.finishes:
                self._finish(self.served[request_ids[finish.index]])

    def _finish(self, served: Served) -> None:
        served.finished_s = self.now
        following = served.arrival.next(self.now) if served.arrival.next is not None else None
        if following is not None:
            self._at(following.time_s, lambda: self._arrive(following))


def real_balancer(setting: Setting) -> LoadBalancer:
    """What an API server of this setting has."""
    return LoadBalancer(setting.num_ranks, setting.num_api_servers, BLOCK_SIZE, setting.scheduler.max_num_seqs)


def prefix_blind_balancer(setting: Setting) -> LoadBalancer:
    """One that is told of no names, and so goes by load alone."""
    return LoadBalancer(setting.num_ranks, setting.num_api_servers, None, setting.scheduler.max_num_seqs)
