"""Step budgets: by themselves, and in an engine whose device has known costs."""

import logging
import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_device import CPU_135M, H100_8B, ClosedLoop, Costs, gaussian_noise
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.scheduler.budget import MIN_PREFILL_TOKENS, BudgetPolicy, TargetBudget, make_budget
from tokenmill_engine.scheduler.cost_model import StepCostModel, StepWork, context_pairs

SIZES = (256, 512, 1024, 2048, 4096, 8192)
H100_COSTS = H100_8B.prefill_costs(SIZES)


def config(
    max_tokens: int = 8192, explicit: bool = False, target_itl_ms: float | None = None, max_num_seqs: int = 256
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=min(max_num_seqs, max_tokens),
        max_num_batched_tokens=max_tokens,
        explicit_budget=explicit,
        target_itl_ms=target_itl_ms,
    )


def take_all(budget: BudgetPolicy, num_decodes: int, decode_context: int, rows: Sequence[tuple[int, int]]) -> list[int]:
    """Tokens that each (pending, computed) row gets."""
    allowance = budget.for_step(num_decodes, decode_context)
    return [allowance.grant(*row) for row in rows]


def plan_of(num_decodes: int, context: int, *chunks: int) -> StepPlan:
    """`num_decodes` rows of `context` tokens and the first `chunks` of prompts."""
    num_scheduled = np.array([1] * num_decodes + list(chunks), dtype=np.int32)
    return StepPlan(
        step=1,
        slots=np.arange(len(num_scheduled), dtype=np.int32),
        num_scheduled=num_scheduled,
        num_computed=np.array([context - 1] * num_decodes + [0] * len(chunks), dtype=np.int32),
        samples=np.ones(len(num_scheduled), dtype=np.bool_),
        num_decodes=num_decodes,
    )


class TestExplicit:
    def test_every_step_may_use_all_of_it(self) -> None:
        budget = make_budget(config(2048, explicit=True), H100_COSTS)
        for num_decodes in (0, 1, 256):
            assert take_all(budget, num_decodes, 1000, [(9000, 0)]) == [2048 - num_decodes]

    def test_with_a_target_it_is_the_upper_bound(self) -> None:
        budget = make_budget(config(512, explicit=True, target_itl_ms=1000), H100_COSTS)
        assert take_all(budget, 1, 1000, [(9000, 0)]) == [511]


class TestDefault:
    def test_steps_beside_running_streams_have_the_size_that_pays(self) -> None:
        budget = make_budget(config(), H100_COSTS)
        assert budget.mixed_tokens == 1024
        assert take_all(budget, 100, 10_000, [(9000, 0)]) == [924]
        assert take_all(budget, 0, 0, [(9000, 0)]) == [8192]

    def test_prompts_progress_beside_more_decodes_than_that(self) -> None:
        budget = make_budget(config(max_num_seqs=2000), H100_COSTS)
        assert take_all(budget, 1020, 10_000, [(9000, 0)]) == [MIN_PREFILL_TOKENS]

    def test_a_usual_size_until_something_is_learnt(self) -> None:
        budget = make_budget(config(2048))
        budget.observe(plan_of(4, 10, 100), 0.0)
        assert take_all(budget, 10, 100, [(9000, 0)]) == [246]
        assert take_all(make_budget(config(100)), 10, 100, [(9000, 0)]) == [54]
        assert take_all(make_budget(config(40)), 1, 100, [(9000, 0)]) == [39]

    @pytest.mark.slow
    @pytest.mark.parametrize(("input_len", "output_len", "num_clients"), [(1024, 128, 128), (128, 64, 256)])
    def test_throughput_is_within_one_percent_of_the_best_budget_and_streams_are_evener(
        self, input_len: int, output_len: int, num_clients: int
    ) -> None:
        """On a card that is as fast with 1024 tokens as with more."""
        noise = gaussian_noise(0.02)

        def run(scheduler: SchedulerConfig) -> ClosedLoop:
            return ClosedLoop(H100_8B, scheduler, input_len, output_len, noise=noise).run(num_clients, 3 * num_clients)

        ours = run(config())
        others = {size: run(config(size, explicit=True)) for size in (512, 1024, 2048, 8192)}
        assert ours.tokens_per_s > 0.99 * max(other.tokens_per_s for other in others.values())
        for size in (2048, 8192):
            assert np.percentile(ours.gaps, 99) < 0.6 * np.percentile(others[size].gaps, 99)
        mixed = [plan.num_tokens for plan, _ in ours.mixed_steps()]
        assert np.median(mixed) == 1024
        assert sum(num_tokens > 1024 for num_tokens in mixed) < 4
        assert max(plan.num_tokens for plan in ours.device.plans) == 8192

    @pytest.mark.parametrize(
        ("base", "best"),
        [
            (CPU_135M.base, 256),
            (((1, 3e-3), (256, 20e-3), (512, 28e-3), (1024, 54e-3), (2048, 110e-3)), 512),
            pytest.param(((1, 0.1), (64, 0.9), (128, 1.75), (256, 3.5), (2048, 28.0)), 64, marks=pytest.mark.slow),
        ],
    )
    def test_without_measurements_it_finds_out(self, base: tuple[tuple[int, float], ...], best: int) -> None:
        costs = Costs(base, decode_per_token=1e-7, prefill_per_pair=1e-9)
        noise = gaussian_noise(0.02, outliers=0.01)
        loop = ClosedLoop(costs, config(2048), 512, 32, measured=False, noise=noise).run(64, 400)
        assert loop.core._budget.mixed_tokens == best
        last = [plan.num_tokens for plan, _ in loop.mixed_steps()][-50:]
        assert np.median(last) == best


class TestTarget:
    @pytest.mark.parametrize("target_ms", [15.0, 40.0, 100.0])
    @pytest.mark.parametrize("input_len", [1024, 4096])
    def test_streams_keep_it_while_prompts_take_the_rest(self, target_ms: float, input_len: int) -> None:
        loop = ClosedLoop(
            H100_8B, config(target_itl_ms=target_ms), input_len, 64, noise=gaussian_noise(0.02, outliers=0.002)
        ).run(64, 160)
        assert np.percentile(loop.gaps, 99) <= target_ms * 1e-3
        # It is used, not just kept: while prompts wait, steps take nearly as long as they may.
        full = [seconds for plan, seconds in loop.mixed_steps() if not plan.samples[-1]]
        assert len(full) > 30
        assert np.median(full) > 0.85 * target_ms * 1e-3
        assert len(loop.streams) == 160

    def test_on_a_device_that_was_not_measured(self) -> None:
        loop = ClosedLoop(
            CPU_135M, config(2048, target_itl_ms=50), 256, 64, measured=False, noise=gaussian_noise(0.03)
        ).run(16, 200)
        assert np.percentile(loop.gaps, 99) <= 0.050
        full = [seconds for plan, seconds in loop.mixed_steps() if not plan.samples[-1]]
        assert np.median(full[20:]) > 0.040

    def test_a_device_that_slows_down_under_load_is_followed(self) -> None:
        slow = gaussian_noise(0.02)
        loop = ClosedLoop(
            H100_8B, config(target_itl_ms=40), 1024, 64, noise=lambda step: slow(step) * min(1.3, 1.0 + step / 300)
        ).run(64, 300)
        assert np.percentile(loop.gaps, 99) <= 0.040

    def test_steps_in_which_nothing_decodes_use_everything(self) -> None:
        budget = make_budget(config(target_itl_ms=10), H100_COSTS)
        assert take_all(budget, 0, 0, [(9000, 0)]) == [8192]

    @pytest.mark.parametrize("steps_per_token", [2, 5])
    def test_several_steps_from_token_to_token_share_it(self, steps_per_token: int) -> None:
        """Of which some may have nothing but prompts: streams wait for those as well."""
        shared = make_budget(config(target_itl_ms=100), H100_COSTS, steps_per_token)
        alone = make_budget(config(target_itl_ms=100 / steps_per_token), H100_COSTS)
        assert take_all(shared, 16, 9000, [(9000, 0)]) == take_all(alone, 16, 9000, [(9000, 0)])
        allowance = shared.for_step(0, 0, num_elsewhere=16)
        assert 0 < allowance.grant(9000, 0) < 9000 // steps_per_token
        assert f"within {100 / steps_per_token:g} ms" in shared.describe()

    def test_the_largest_chunk_that_fits_no_larger_one(self) -> None:
        model = StepCostModel(8192, H100_COSTS)
        budget = TargetBudget(8192, 0.030, model)
        limit_s = 0.030 / (1 + 2.5 * model.noise)
        granted = take_all(budget, 64, 64 * 1000, [(300, 500), (9000, 2000), (50, 0)])
        assert granted[0] == 300
        assert 0 < granted[1] < 9000
        assert granted[2] == 0
        for extra, fits in ((0, True), (1, False)):
            pairs = context_pairs(300, 500) + context_pairs(granted[1] + extra, 2000)
            work = StepWork(64 + 300 + granted[1] + extra, 64 * 1000, pairs)
            assert (model.predict(work) <= limit_s) == fits

    def test_chunks_of_a_long_context_are_smaller(self) -> None:
        budget = make_budget(config(target_itl_ms=30), H100_COSTS)
        chunks = [take_all(budget, 8, 8000, [(9000, computed)])[0] for computed in (0, 4000, 30_000)]
        assert chunks == sorted(chunks, reverse=True)
        assert chunks[2] < 0.8 * chunks[0]

    def test_prompts_progress_even_if_decodes_alone_take_longer(self) -> None:
        loop = ClosedLoop(H100_8B, config(1024, target_itl_ms=3), 256, 32, noise=gaussian_noise(0.02)).run(16, 48)
        mixed = [plan.num_tokens - plan.num_decodes for plan, _ in loop.mixed_steps()]
        assert max(mixed) == MIN_PREFILL_TOKENS
        assert all(len(stream.token_times) == 32 for stream in loop.streams.values())

    def test_with_nothing_learnt_yet_only_the_least_is_promised(self) -> None:
        budget = make_budget(config(target_itl_ms=30))
        assert take_all(budget, 5, 500, [(9000, 0)]) == [MIN_PREFILL_TOKENS]

    def test_a_target_out_of_reach_is_said_once_a_minute(self, caplog: pytest.LogCaptureFixture) -> None:
        now = [100.0]
        budget = TargetBudget(8192, 0.010, StepCostModel(8192, H100_COSTS), clock=lambda: now[0])
        plan = plan_of(256, 1088, MIN_PREFILL_TOKENS)
        for _ in range(30):
            budget.observe(plan, 0.0205)
        assert len(caplog.records) == 1
        assert caplog.records[0].levelno == logging.WARNING
        text = caplog.records[0].getMessage()
        assert "--target-itl-ms 10 cannot be kept" in text
        assert "256 running requests" in text
        assert f"Prompts still get {MIN_PREFILL_TOKENS} tokens" in text
        now[0] += 61
        budget.observe(plan, 0.0205)
        assert len(caplog.records) == 2

    def test_a_target_that_is_kept_is_no_reason_to_speak(self, caplog: pytest.LogCaptureFixture) -> None:
        ClosedLoop(H100_8B, config(target_itl_ms=25), 512, 32, noise=gaussian_noise(0.02)).run(64, 128)
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


ROWS = st.lists(st.tuples(st.integers(2, 5000), st.integers(0, 40_000)), max_size=8)


@settings(max_examples=200)
@given(
    rows=ROWS,
    num_decodes=st.integers(0, 400),
    context=st.integers(1, 5000),
    max_tokens=st.integers(1, 9000),
    kind=st.sampled_from(["explicit", "default", "target"]),
    target_ms=st.floats(0.5, 500.0),
    measured=st.booleans(),
    seen=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500), st.floats(1e-4, 1.0)), max_size=10),
)
def test_whatever_was_learnt_no_step_exceeds_the_maximum_and_prompts_progress(
    rows: list[tuple[int, int]],
    num_decodes: int,
    context: int,
    max_tokens: int,
    kind: str,
    target_ms: float,
    measured: bool,
    seen: list[tuple[int, int, float]],
) -> None:
    scheduler = config(max_tokens, kind == "explicit", target_ms if kind == "target" else None)
    budget = make_budget(scheduler, H100_COSTS if measured else ())
    for decodes, chunk, elapsed_s in seen:
        budget.observe(plan_of(decodes, context, *[chunk] * (chunk > 0)), elapsed_s)
    granted = take_all(budget, num_decodes, num_decodes * context, rows)
    assert granted == take_all(budget, num_decodes, num_decodes * context, rows), "asking changed something"
    decodes = budget.for_step(num_decodes, num_decodes * context).num_decodes
    assert decodes == min(num_decodes, max_tokens)
    assert decodes + sum(granted) <= max_tokens
    assert all(0 <= tokens <= pending for tokens, (pending, _) in zip(granted, rows, strict=True))
    assert sum(granted) >= min(sum(pending for pending, _ in rows), max_tokens - decodes, MIN_PREFILL_TOKENS)
    # Rows are served in order: who gets less than it wants is the last one that gets anything.
    short = [tokens < pending for tokens, (pending, _) in zip(granted, rows, strict=True)]
    if any(short):
        assert granted[short.index(True) + 1 :] == [0] * (len(rows) - short.index(True) - 1)


WILD = st.one_of(
    st.floats(1e-9, 1e3), st.sampled_from([0.0, -1.0, 1e-9, 1e3, 1e300, 5e-324, float("nan"), float("inf")])
)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["default", "target"]),
    measured=st.booleans(),
    seen=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9000), st.integers(1, 10**6), WILD), max_size=40),
)
def test_no_time_however_wild_ends_the_advice(
    kind: str, measured: bool, seen: list[tuple[int, int, int, float]]
) -> None:
    budget = make_budget(config(target_itl_ms=30 if kind == "target" else None), H100_COSTS if measured else ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decodes, chunk, context, elapsed_s in seen:
            budget.observe(plan_of(max(decodes, chunk == 0), context, *[chunk] * (chunk > 0)), elapsed_s)
            granted = take_all(budget, 100, 100 * context, [(9000, 0)])
            assert MIN_PREFILL_TOKENS <= granted[0] <= 8092
            assert budget.describe()
    assert 1 <= budget.mixed_tokens <= 8192


@pytest.mark.parametrize(
    ("scheduler", "costs", "words"),
    [
        (config(512, explicit=True), H100_COSTS, ["512 tokens in every step"]),
        (config(), H100_COSTS, ["8192 tokens in a step", "1024 beside running streams", "1024: 21.2"]),
        (config(2048), (), ["2048 tokens in a step", "256 beside running streams", "compared"]),
        (config(target_itl_ms=12.5), H100_COSTS, ["at most 8192 tokens", "12.5 ms", f"{MIN_PREFILL_TOKENS} prompt"]),
    ],
)
def test_the_log_says_which_policy_is_in_force(
    scheduler: SchedulerConfig, costs: tuple[tuple[int, float], ...], words: list[str]
) -> None:
    text = make_budget(scheduler, costs).describe()
    assert all(word in text for word in words), text
