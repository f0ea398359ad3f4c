"""The cost model against devices with known costs: how fast and how well it learns, and what does not mislead it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_device import CPU_135M, H100_8B, Costs
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.scheduler.cost_model import StepCostModel, StepWork, context_pairs, work_of

SIZES = (256, 512, 1024, 2048, 4096, 8192)


def random_work(generator: np.random.Generator, max_tokens: int = 8192) -> StepWork:
    """Decodes alone, decodes beside a prompt, or prompts alone, about equally often."""
    num_decodes = int(generator.integers(1, 257))
    decode_context = num_decodes * int(generator.integers(50, 3000))
    kind = generator.integers(3)
    if kind == 0:
        return StepWork(num_decodes, decode_context)
    chunk = int(generator.integers(16, min(1024, max_tokens - num_decodes)))
    if kind == 1:
        pairs = context_pairs(chunk, int(generator.integers(0, 8000)))
        return StepWork(num_decodes + chunk, decode_context, pairs)
    num_tokens = int(generator.integers(16, max_tokens + 1))
    return StepWork(num_tokens, 0, context_pairs(min(num_tokens, 1024), 0) * max(1.0, num_tokens / 1024))


def teach(model: StepCostModel, costs: Costs, generator: np.random.Generator, num_steps: int, **how: float) -> None:
    """Random steps: `noise` is relative, `outliers` the share of steps that waited for something else."""
    for _ in range(num_steps):
        work = random_work(generator, 8192 if costs is H100_8B else 2048)
        elapsed = costs.seconds(work) * (1 + how.get("noise", 0.02) * generator.standard_normal())
        if generator.random() < how.get("outliers", 0.02):
            elapsed *= generator.uniform(2, 50)
        model.observe(work, elapsed)


def errors(model: StepCostModel, costs: Costs, generator: np.random.Generator) -> np.ndarray:
    """Relative errors of 300 predictions."""
    works = [random_work(generator, 8192 if costs is H100_8B else 2048) for _ in range(300)]
    return np.array([model.predict(work) / costs.seconds(work) - 1 for work in works])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("costs", "max_tokens", "measured"), [(H100_8B, 8192, True), (H100_8B, 8192, False), (CPU_135M, 2048, False)]
)
def test_it_converges_in_spite_of_noise_and_outliers(costs: Costs, max_tokens: int, measured: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = StepCostModel(max_tokens, costs.prefill_costs(SIZES) if measured else ())
    teach(model, costs, generator, 600)
    found = np.abs(errors(model, costs, generator))
    assert np.median(found) < 0.02
    # The kinks of the CPU's costs lie between knots, and nobody may count on 1 token after 200 of other sizes.
    assert np.percentile(found, 90) < (0.03 if costs is H100_8B else 0.12)
    assert 0.01 < model.noise < (0.04 if costs is H100_8B else 0.12)


def test_what_was_measured_at_the_start_predicts_the_first_steps() -> None:
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    for size in SIZES:
        assert model.predict(StepWork(size)) == pytest.approx(H100_8B.seconds(StepWork(size)))
    assert model.predict(StepWork(1)) == pytest.approx(H100_8B.seconds(StepWork(1)), rel=0.3)
    generator = np.random.default_rng(0)
    teach(model, H100_8B, generator, 40, outliers=0.0)
    assert np.median(np.abs(errors(model, H100_8B, generator))) < 0.03


def test_what_one_size_teaches_corrects_the_others() -> None:
    """The card is slower than at the start; only steps of 1024 tokens say so."""
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    for _ in range(60):
        model.observe(StepWork(1024), 1.2 * H100_8B.seconds(StepWork(1024)))
    assert model.predict(StepWork(1024)) == pytest.approx(1.2 * H100_8B.seconds(StepWork(1024)), rel=0.01)
    assert model.predict(StepWork(8192)) > 1.1 * H100_8B.seconds(StepWork(8192))


@pytest.mark.parametrize("seed", range(3))
def test_what_attention_takes_of_a_step(seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    teach(model, H100_8B, generator, 300)
    for work in (StepWork(1024, 256 * 1088), StepWork(8192, 0, 8 * context_pairs(1024, 0))):
        base = H100_8B.seconds(StepWork(work.num_tokens))
        assert model.attention_seconds(work) == pytest.approx(H100_8B.seconds(work) - base, rel=0.25)
    assert model.attention_seconds(StepWork(8192)) == 0.0


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_it_follows_a_device_that_changes(factor: float) -> None:
    generator = np.random.default_rng(1)
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    teach(model, H100_8B, generator, 500)
    changed = Costs(
        tuple((tokens, seconds * factor) for tokens, seconds in H100_8B.base),
        H100_8B.decode_per_token * factor,
        H100_8B.prefill_per_pair * factor,
    )
    teach(model, changed, generator, 150)
    found = np.abs(errors(model, changed, generator))
    assert np.median(found) < 0.03
    assert np.percentile(found, 90) < 0.1


def test_steps_that_waited_for_something_change_next_to_nothing() -> None:
    generator = np.random.default_rng(2)
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    teach(model, H100_8B, generator, 100, outliers=0.0)
    work = StepWork(1024, 100_000, 500_000)
    before = model.predict(work)
    for _ in range(4):
        model.observe(work, before * 100)
        model.observe(work, before)
    assert model.predict(work) == pytest.approx(before, rel=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_the_first_step_of_all_may_be_one_that_waited(seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = StepCostModel(8192)
    model.observe(StepWork(2048), 20 * H100_8B.seconds(StepWork(2048)))
    teach(model, H100_8B, generator, 300)
    assert np.percentile(np.abs(errors(model, H100_8B, generator)), 90) < 0.05


def test_a_time_of_zero_was_not_measured() -> None:
    model = StepCostModel(8192)
    model.observe(StepWork(100), 0.0)
    assert not model.has_learnt


def test_measurements_that_cannot_be_are_left_out() -> None:
    """Times of 0, sizes that never occur; a size that seemed quicker than a smaller one counts as no quicker."""
    model = StepCostModel(1024, ((128, 0.0), (256, 0.01), (512, 0.005), (1024, float("inf")), (4096, 1.0)))
    assert model.predict(StepWork(512)) == pytest.approx(0.01)
    assert model.predict(StepWork(1024)) == pytest.approx(0.02)


@pytest.mark.parametrize("measured", [True, False])
def test_a_model_that_lost_itself_begins_anew(measured: bool) -> None:
    """What is no number leaves what the start measured, or nothing."""
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES) if measured else ())
    model.observe(StepWork(1024), 0.02)
    assert model.has_learnt
    model.observe(StepWork(1024, 0, float("inf")), 0.02)
    assert model.has_learnt == measured
    if measured:
        assert model.predict(StepWork(512)) == H100_8B.seconds(StepWork(512))
    for _ in range(20):
        model.observe(StepWork(1024), 0.02)
    assert model.predict(StepWork(1024)) == pytest.approx(0.02, rel=0.02)


def test_the_work_of_a_plan() -> None:
    plan = StepPlan(
        step=1,
        slots=np.arange(4, dtype=np.int32),
        num_scheduled=np.array([1, 1, 10, 20], dtype=np.int32),
        num_computed=np.array([99, 7, 50, 0], dtype=np.int32),
        samples=np.array([True, True, False, True]),
        num_decodes=2,
    )
    assert work_of(plan) == StepWork(32, 100 + 8, 10 * 50 + 50 + 200)


WORKS = st.builds(StepWork, st.integers(1, 3000), st.integers(0, 10**7), st.floats(0.0, 1e9))
SEEN = st.lists(st.tuples(WORKS, st.floats(0.0, 1e4)), max_size=40)
MEASURED = st.lists(st.tuples(st.integers(1, 4000), st.floats(0.0, 10.0)), max_size=5)


@settings(max_examples=100)
@given(SEEN, st.integers(1, 3000), MEASURED)
def test_whatever_it_saw_predictions_are_finite_not_negative_and_grow_with_the_work(
    seen: list[tuple[StepWork, float]], max_tokens: int, measured: list[tuple[int, float]]
) -> None:
    models = [StepCostModel(max_tokens, measured) for _ in range(2)]
    for model in models:
        for work, elapsed in seen:
            model.observe(work, elapsed)
    first, second = models
    assert first.has_learnt == second.has_learnt
    if not first.has_learnt:
        return
    sizes = sorted({1, 2, 5, 31, 100, 700, 2999, max_tokens})
    predicted = [first.predict(StepWork(size)) for size in sizes]
    assert predicted == [second.predict(StepWork(size)) for size in sizes]
    assert all(0.0 <= seconds < float("inf") for seconds in predicted)
    assert predicted == sorted(predicted)
    assert first.seconds(max_tokens, 1000, 0.0) <= first.seconds(max_tokens, 2000, 50.0)


def test_sizes_beyond_the_largest_that_was_measured_cost_in_proportion() -> None:
    model = StepCostModel(16384, H100_8B.prefill_costs(SIZES))
    assert model.predict(StepWork(16384)) == pytest.approx(2 * H100_8B.seconds(StepWork(8192)))


def test_hours_of_equal_steps_do_not_make_it_forget() -> None:
    """Such steps cannot tell one cost from another; those of other sizes stay known nearly as well."""
    generator = np.random.default_rng(0)
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    teach(model, H100_8B, generator, 300)
    for _ in range(20_000):
        work = StepWork(256, 256 * 1000)
        model.observe(work, H100_8B.seconds(work) * (1 + 0.02 * generator.standard_normal()))
    found = np.abs(errors(model, H100_8B, generator))
    assert np.median(found) < 0.04
    assert np.percentile(found, 90) < 0.1


def test_a_cost_that_seemed_to_be_nothing_is_found_out() -> None:
    """For a long time reading the context costs nothing; then it does."""
    generator = np.random.default_rng(0)
    free = Costs(H100_8B.base, 0.0, 0.0)
    model = StepCostModel(8192, H100_8B.prefill_costs(SIZES))
    teach(model, free, generator, 2000)
    assert np.median(np.abs(errors(model, free, generator))) < 0.03
    teach(model, H100_8B, generator, 500)
    assert np.median(np.abs(errors(model, H100_8B, generator))) < 0.03
