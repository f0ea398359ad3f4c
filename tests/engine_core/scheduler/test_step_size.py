"""The default size of mixed steps: what decides, what moves it, and what does not."""

import logging
from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.simulated_device import (
    EFFECTS,
    H100_8B,
    H100_8B_FLAT,
    NO_EFFECTS,
    ClosedLoop,
    Costs,
    Effects,
    gaussian_noise,
)
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.scheduler.cost_model import StepCostModel, StepWork
from tokenmill_engine.scheduler.step_size import StepSize

SIZES = (256, 512, 1024, 2048, 4096, 8192)
PROMPT_LEN = 256
"""Of the prompts that a worker times at its start."""

Start = tuple[tuple[int, float], ...]


def start_of(*per_token_us: float) -> Start:
    """Costs of `SIZES` by what a token takes."""
    return tuple((size, size * us * 1e-6) for size, us in zip(SIZES, per_token_us, strict=False))


def chosen(start: Start, max_tokens: int = 8192) -> int:
    return StepSize(max_tokens, start).in_use


class TestStart:
    def test_a_size_is_doubled_as_long_as_that_saves_a_percent_where_steps_are_short(self) -> None:
        assert chosen(start_of(2.0, 1.97, 1.94, 1.91)) == 2048
        assert chosen(start_of(2.0, 1.97, 1.96, 1.5)) == 512

    def test_it_has_to_save_the_more_the_longer_steps_get(self) -> None:
        # 512 instead of 256 tokens add about 5, 9.5, 25 and 1600 ms.
        for per_token_us, least_gain in ((20, 0.01), (40, 0.032), (120, 0.10), (8000, 0.10)):
            worth, not_worth = 1.0 - least_gain - 0.005, 1.0 - least_gain + 0.005
            assert chosen(start_of(per_token_us, per_token_us * worth)) == 512
            assert chosen(start_of(per_token_us, per_token_us * not_worth)) == 256

    def test_sizes_that_were_not_measured_or_are_too_large_are_not_chosen(self) -> None:
        assert chosen(start_of(8, 4, 2, 1), max_tokens=600) == 512
        assert chosen(((256, 1.0), (1024, 1.1))) == 256
        assert chosen(((300, 1.0),), max_tokens=300) == 256
        assert chosen((), max_tokens=100_000) == 256

    @pytest.mark.parametrize(
        "start_ms",
        [
            (8.0, 10.8, 19.4, 39.0, 79.2, 157.6),
            (8.0, 11.0, 19.7, 40.0, 79.8, 169.0),
            (8.0, 11.2, 19.7, 40.3, 82.3, 165.8),
            (8.1, 11.3, 20.1, 39.5, 82.0, 168.0),
            (8.1, 11.6, 21.2, 39.9, 80.0, 164.3),
            (8.0, 11.2, 20.1, 39.1, 82.0, 169.3),
            (8.1, 11.4, 20.3, 39.8, 79.2, 165.0),
        ],
    )
    def test_starts_of_a_card(self, start_ms: Sequence[float]) -> None:
        """What an H100 measured with an 8B model, the first six each size once."""
        assert chosen(tuple((size, ms * 1e-3) for size, ms in zip(SIZES, start_ms, strict=True))) == 1024

    @pytest.mark.parametrize("costs", [H100_8B, H100_8B_FLAT])
    def test_noise_of_a_percent_does_not_matter(self, costs: Costs) -> None:
        generator = np.random.default_rng(0)
        for _ in range(100):
            factors = np.clip(1.0 + 0.01 * generator.standard_normal(len(SIZES)), 0.985, 1.015).tolist()
            true = costs.prefill_costs(SIZES, PROMPT_LEN)
            assert chosen(tuple((size, s * f) for (size, s), f in zip(true, factors, strict=True))) == 1024


class TestComparisons:
    """A device on which every token takes 20 us in a step of 1024, whatever the start said."""

    def setup_method(self) -> None:
        self.now_s = 0.0
        self.size = StepSize(8192, start_of(40, 30, 20, 20, 20, 20), clock=lambda: self.now_s)
        self.model = StepCostModel(8192)
        self.visited: list[int] = []

    def run(self, num_steps: int, gains: dict[int, float], least: int = 100, waits_s: float = 0.0) -> None:
        """Full steps. `gains`: what a token costs less at twice the size; nothing where it is not said."""
        for _ in range(num_steps):
            size = max(self.size.next_size, least)
            if size != self.size.in_use:
                self.visited.append(size)
            per_token = 20e-6
            for other in SIZES:
                if 1024 <= other < size:
                    per_token *= 1.0 - gains.get(other, 0.0)
                if size <= other < 1024:
                    per_token /= 1.0 - gains.get(other, 0.0)
            self.size.observe(StepWork(size), size * per_token + waits_s, least, self.model)

    def test_what_was_measured_at_the_start_is_not_believed_against_them(self) -> None:
        assert self.size.in_use == 1024
        self.run(100, {512: 0.0})
        assert self.size.in_use == 512
        assert self.visited == [512] * 5

    def test_more_is_taken_if_it_pays(self) -> None:
        self.run(2000, {512: 0.2, 1024: 0.15})
        assert self.size.in_use == 2048
        assert self.visited.count(2048) == 4

    def test_not_for_less_than_it_has_to_save(self) -> None:
        self.run(5000, {512: 0.2, 1024: 0.08})
        assert self.size.in_use == 1024
        assert self.visited.count(2048) < 5000 / 200

    def test_one_doubling_away_from_the_start_is_the_end(self) -> None:
        self.run(10_000, {512: 0.2, 1024: 0.2, 2048: 0.2})
        assert self.size.in_use == 2048
        assert max(self.visited) == 2048

    def test_a_device_that_changes_is_followed_back(self) -> None:
        self.run(2000, {512: 0.2, 1024: 0.15})
        assert self.size.in_use == 2048
        self.run(10_000, {512: 0.2, 1024: 0.0})
        assert self.size.in_use == 1024

    def test_steps_that_are_not_full_or_not_looked_at_compare_nothing(self) -> None:
        for _ in range(1000):
            self.size.observe(StepWork(900), 0.002, 100, self.model)
            self.size.observe(StepWork(1024), 0.0, 100, self.model)
            self.size.observe(StepWork(1024), float("inf"), 100, self.model)
            self.size.interrupt()
            assert self.size.next_size == 1024

    def test_sizes_without_room_for_the_decodes_are_not_visited(self) -> None:
        self.run(5000, {512: 0.2, 1024: 0.0}, least=600)
        assert set(self.visited) == {2048}

    def test_each_move_is_explained(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        self.run(100, {512: 0.0})
        (move,) = [record for record in caplog.records if record.levelno == logging.INFO]
        text = move.getMessage()
        assert "1024 -> 512: a step of 1024 tokens instead of 512 saves 0.0% a token (5 comparisons, +- " in text
        assert "ms by tokens at the start: 256: 10.2, 512: 15.4, 1024: 20.5, 2048: 41.0" in text
        compared = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
        assert len(compared) == 5
        assert "a step of 512 tokens took 10.24 ms, the one of 1024 before it 20.48, context 0" in compared[0]
        # Another move at once is for those who look closely.
        self.run(10_000, {512: 0.5})
        assert self.size.in_use == 1024
        assert len([record for record in caplog.records if record.levelno == logging.INFO]) == 1


def closed_loop(
    costs: Costs, start: Start, effects: Effects = NO_EFFECTS, explicit: int = 0, num_requests: int = 640
) -> ClosedLoop:
    """256 clients with 1024 tokens in and 128 out, after a few requests that warm up."""
    scheduler = SchedulerConfig(256, explicit or 8192, explicit_budget=explicit > 0)
    noise = gaussian_noise(0.02)
    loop = ClosedLoop(costs, scheduler, 1024, 128, noise=noise, num_blocks=20_000, start_costs=start, effects=effects)
    return loop.run(32, 32).run(256, num_requests)


class TestUnderLoad:
    @pytest.mark.slow
    @pytest.mark.parametrize("effects", EFFECTS.values(), ids=EFFECTS)
    def test_nothing_that_a_loaded_card_does_moves_it(self, effects: Effects) -> None:
        loop = closed_loop(H100_8B_FLAT, H100_8B_FLAT.prefill_costs(SIZES, PROMPT_LEN), effects)
        mixed = [plan.num_tokens for plan, _ in loop.mixed_steps()]
        assert loop.core._budget.mixed_tokens == 1024
        assert sum(num_tokens > 1024 for num_tokens in mixed) < 0.01 * len(mixed)
        assert np.percentile(loop.gaps, 99) < 0.040

    @pytest.mark.slow
    def test_visits_cost_next_to_nothing(self) -> None:
        ours = closed_loop(H100_8B_FLAT, H100_8B_FLAT.prefill_costs(SIZES, PROMPT_LEN))
        fixed = closed_loop(H100_8B_FLAT, (), explicit=1024)
        assert ours.tokens_per_s > 0.995 * fixed.tokens_per_s

    @pytest.mark.slow
    @pytest.mark.parametrize(("size", "factor"), [(512, 0.9), (512, 1.1), (1024, 0.9), (2048, 0.9), (4096, 0.9)])
    @pytest.mark.parametrize("costs", [H100_8B, H100_8B_FLAT])
    def test_a_start_that_is_wrong_by_a_tenth_is_corrected(self, costs: Costs, size: int, factor: float) -> None:
        true = costs.prefill_costs(SIZES, PROMPT_LEN)
        start = tuple((tokens, s * factor if tokens == size else s) for tokens, s in true)
        # Upwards it takes longer, for the sake of running streams.
        loop = closed_loop(costs, start, num_requests=1000 if StepSize(8192, start).in_use < 1024 else 640)
        mixed = [plan.num_tokens for plan, _ in loop.mixed_steps()]
        assert loop.core._budget.mixed_tokens == 1024
        assert np.median(mixed[-200:]) == 1024
