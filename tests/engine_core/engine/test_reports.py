"""What API servers are told beside outputs: loads, and which blocks there are."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_executor import VOCAB_SIZE
from tests.support.scheduling import Driver, Setting
from tokenmill_engine.block_hash import CacheKey, hash_full_blocks, short_name
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.kv_cache.block_pool import BlockPool
from tokenmill_engine.kv_cache.events import BlockJournal
from tokenmill_engine.messages import BlockEvents, EngineLoad, LoadReport, SamplingParams, StepOutput
from tokenmill_engine.reports import Output, Reporter

IDLE = EngineLoad()
BUSY = EngineLoad(num_running=1, kv_usage=0.5)
NAMES = hash_full_blocks(np.arange(32, dtype=np.int32), 4, CacheKey())


class Clock:
    """Stands still until it is told otherwise; in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Mirror:
    """The blocks of an engine as one incarnation of an API server knows them. It is None before its snapshot."""

    def __init__(self, client: int, incarnation: int) -> None:
        self.client = client
        self.incarnation = incarnation
        self.names: set[int] | None = None

    def take(self, outputs: Iterable[Output]) -> None:
        for client, message in outputs:
            if client != self.client or not isinstance(message, BlockEvents):
                continue
            assert message.incarnation == self.incarnation
            stored = set(np.frombuffer(message.stored, "<u8").tolist())
            removed = set(np.frombuffer(message.removed, "<u8").tolist())
            assert not stored & removed
            if message.is_snapshot:
                assert self.names is None
                self.names = stored
            else:
                assert self.names is not None
                assert removed <= self.names
                assert not stored & self.names
                self.names = self.names - removed | stored


def output_for(client: int, load: EngineLoad) -> Output:
    ids = np.array([make_request_id(client, 0, 1)], dtype="<i8").tobytes()
    return client, StepOutput(0, ids, np.ones(1, dtype="<i4").tobytes(), np.ones(1, dtype="<i4").tobytes(), load)


def report(reporter: Reporter, load: EngineLoad, outputs: Iterable[Output] = ()) -> list[Output]:
    """What comes after `outputs`."""
    before = list(outputs)
    after = list(before)
    reporter.report(after, load)
    assert after[: len(before)] == before
    return after[len(before) :]


class TestLoads:
    @pytest.fixture
    def reporter(self) -> Reporter:
        reporter = Reporter(3, BlockPool(8))
        for client in (0, 1):
            reporter.add_listener(client, 5)
        report(reporter, BUSY)
        return reporter

    def test_nobody_is_told_the_same_twice(self, reporter: Reporter) -> None:
        assert report(reporter, BUSY) == []
        assert report(reporter, IDLE, [output_for(0, IDLE)]) == [(1, LoadReport(3, IDLE, 5))]
        assert report(reporter, IDLE) == []

    def test_what_is_waiting_is_told_when_it_has_changed_much(self, reporter: Reporter) -> None:
        changes = [200, 900, 1100, 1300, 0]
        loads = [EngineLoad(1, 0, 0.5, num_tokens) for num_tokens in changes]
        told = [bool(report(reporter, load)) for load in loads]
        assert told == [False, False, True, False, True]

    def test_who_sends_requests_is_told_how_many_have_come(self) -> None:
        reporter = Reporter(3, BlockPool(8), counts_requests=True)
        for client in (0, 1):
            reporter.add_listener(client, 300)
        report(reporter, BUSY)
        for counter in range(3):
            reporter.count_request(make_request_id(1, 300, counter))
        # Of its predecessor, and of one that does not listen.
        reporter.count_request(make_request_id(1, 299, 4))
        reporter.count_request(make_request_id(2, 0, 4))
        assert report(reporter, BUSY) == [(1, LoadReport(3, EngineLoad(1, 0, 0.5, 0, 3), 300))]
        reporter.begin_anew(1, 300)
        reporter.add_listener(0, 301)
        loads = [EngineLoad(1, 0, 0.5, 0, num_received) for num_received in (0, 3)]
        assert report(reporter, BUSY) == [(0, LoadReport(3, loads[0], 301)), (1, LoadReport(3, loads[1], 300))]

    def test_without_a_journal_nothing_is_told_of_blocks(self, reporter: Reporter) -> None:
        reporter.add_listener(2, 0)
        assert report(reporter, BUSY) == [(2, LoadReport(3, BUSY, 0))]


class TestBlocks:
    def test_they_are_told_in_batches_and_at_once_when_the_engine_goes_idle(self) -> None:
        clock, journal = Clock(), BlockJournal()
        pool = BlockPool(8, journal)
        reporter = Reporter(0, pool, journal, clock=clock)
        mirror = Mirror(4, 1)
        reporter.add_listener(4, 1)
        mirror.take(report(reporter, IDLE))
        assert mirror.names == set()
        blocks = pool.allocate(8)
        sizes = []
        for index in range(7):
            pool.publish(blocks[index], 0, NAMES[index])
            clock.now += 0.007
            mirror.take(report(reporter, BUSY))
            sizes.append(len(mirror.names))
        assert sizes == [1, 1, 1, 4, 4, 4, 7]
        pool.publish(blocks[7], 0, NAMES[7])
        mirror.take(report(reporter, BUSY))
        assert len(mirror.names) == 7
        mirror.take(report(reporter, IDLE))
        assert mirror.names == {short_name(name) for name in NAMES}
        clock.now += 1.0
        assert report(reporter, IDLE) == []

    def test_a_newcomers_snapshot_does_not_disturb_the_others(self) -> None:
        """A block that comes before the snapshot and goes after it is told to neither or to both as gone."""
        clock, journal = Clock(), BlockJournal()
        pool = BlockPool(2, journal)
        reporter = Reporter(0, pool, journal, clock=clock)
        mirrors = [Mirror(0, 0), Mirror(1, 0)]
        reporter.add_listener(0, 0)
        for mirror in mirrors:
            mirror.take(report(reporter, BUSY))
        pool.publish(pool.allocate(1)[0], 0, NAMES[0])
        outputs = report(reporter, BUSY)
        pool.publish(pool.allocate(1)[0], 0, NAMES[1])
        reporter.add_listener(1, 0)
        outputs += report(reporter, BUSY)
        pool.release([1])
        pool.allocate(1)
        outputs += report(reporter, IDLE)
        for mirror in mirrors:
            mirror.take(outputs)
            assert mirror.names == {short_name(NAMES[0])}

    def test_who_missed_reports_begins_anew_and_nobody_else_does(self) -> None:
        journal = BlockJournal()
        reporter = Reporter(0, BlockPool(2, journal), journal)
        reporter.add_listener(0, 7)
        greeting = report(reporter, IDLE)
        for client, incarnation in ((0, 6), (1, 7)):
            reporter.begin_anew(client, incarnation)
            assert report(reporter, IDLE) == []
        reporter.begin_anew(0, 7)
        assert report(reporter, IDLE) == greeting

    def test_the_loads_of_a_greeting_come_before_its_snapshot(self) -> None:
        journal = BlockJournal()
        reporter = Reporter(0, BlockPool(2, journal), journal)
        reporter.add_listener(0, 7)
        assert report(reporter, IDLE) == [
            (0, LoadReport(0, IDLE, 7)),
            (0, BlockEvents(0, b"", b"", 7, is_snapshot=True)),
        ]


PREFIXES = [[10 * prefix + position % 10 for position in range(17)] for prefix in range(3)]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    prefix = draw(st.sampled_from(PREFIXES))
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=5))
    return prefix[: draw(st.sampled_from([3, 9, 17, 17]))] + own


acts = st.one_of(
    st.tuples(st.just("add"), prompts(), st.integers(1, 12), st.sampled_from([None, None, "salt"])),
    st.tuples(st.just("add"), prompts(), st.integers(1, 12), st.none()),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("hello"), st.integers(0, 2)),
    st.tuples(st.just("gone"), st.integers(0, 2)),
    st.tuples(st.just("steps"), st.integers(1, 6), st.sampled_from([0.0, 0.001, 0.015, 0.05])),
    st.tuples(st.just("steps"), st.integers(1, 6), st.sampled_from([0.0, 0.001, 0.015, 0.05])),
)


class Balanced:
    """An engine's scheduler with a small pool, and the API servers that follow its blocks."""

    def __init__(self, setting: Setting, is_checked: bool) -> None:
        self.is_checked = is_checked
        """After every step, which ends all batches."""
        self.driver = Driver(setting)
        self.clock = Clock()
        assert setting.journal is not None
        self.reporter = Reporter(0, self.driver.kv.pool, setting.journal, clock=self.clock)
        self.mirrors: dict[int, Mirror] = {}
        self.num_greetings = 0

    def act(self, act: tuple) -> None:
        match act:
            case ("add", prompt, max_tokens, salt):
                self.driver.add(len(self.driver.told), prompt, SamplingParams(max_tokens=max_tokens), cache_salt=salt)
            case ("abort", request_id):
                self.driver.abort(request_id)
            case ("hello", client):
                self.num_greetings += 1
                self.mirrors[client] = Mirror(client, self.num_greetings)
                self.reporter.add_listener(client, self.num_greetings)
            case ("gone", client) if client in self.mirrors:
                mirror = self.mirrors.pop(client)
                self.reporter.remove_listener(client, mirror.incarnation)
            case ("steps", count, seconds):
                for _ in range(count):
                    self.step(seconds)

    def step(self, seconds: float) -> bool:
        """One turn of the engine's loop; False if there was nothing to do."""
        self.clock.now += seconds
        has_stepped = self.driver.step()
        self.tell(self.driver.scheduler.load)
        if self.is_checked:
            self.check()
        return has_stepped

    def tell(self, load: EngineLoad) -> None:
        outputs = report(self.reporter, load)
        for mirror in self.mirrors.values():
            mirror.take(outputs)

    def check(self) -> None:
        """Who asks for it now knows exactly the names of the pool."""
        self.tell(IDLE)
        names = {short_name(name) for name in self.driver.kv.pool.names(0)}
        assert all(mirror.names == names for mirror in self.mirrors.values())


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(acts, min_size=20, max_size=60),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.integers(8, 14),
    st.booleans(),
)
def test_from_any_greeting_on_a_client_knows_the_pools_names(
    script: list[tuple], depth: int, num_groups: int, num_blocks: int, is_checked: bool
) -> None:
    """With evictions, preemptions, prefix hits, aborts and restarted API servers."""
    setting = Setting(num_blocks * num_groups, 4, num_groups, 4, budget=16, depth=depth, journal=BlockJournal())
    engine = Balanced(setting, is_checked)
    for act in script:
        engine.act(act)
    while engine.step(0.004):
        pass
    engine.check()
