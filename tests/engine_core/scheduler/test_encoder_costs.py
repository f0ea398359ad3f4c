"""What encoding is expected to take, and what a step whose time is limited does about it."""

import pytest

from tests.support.media_items import IMAGE_TOKEN, qwen_item
from tests.support.scheduling import Driver, Setting
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.messages import MediaItem, SamplingParams
from tokenmill_engine.request import Request
from tokenmill_engine.scheduler.budget import MIN_PREFILL_TOKENS, Allowance, TimedAllowance
from tokenmill_engine.scheduler.cost_model import StepCostModel
from tokenmill_engine.scheduler.encoder_budget import EncoderBudget, MediaAllowance
from tokenmill_engine.scheduler.encoder_costs import EncoderCosts

MODEL = StepCostModel(256, ((8, 0.010), (64, 0.020), (256, 0.055)))
LIMIT_S = 0.050


def budget_with(seconds_per_token: float) -> EncoderBudget:
    budget = EncoderBudget(SchedulerConfig(max_num_batched_tokens=256))
    budget.costs.observe(10, 10 * seconds_per_token)
    return budget


def timed(budget: EncoderBudget, limit_s: float = LIMIT_S) -> MediaAllowance:
    return budget.share(TimedAllowance(256, 4, 100, limit_s, MODEL))


def request_of(*parts: int | tuple[str, int]) -> Request:
    """Text of so many tokens, and images of as many as said."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [index % 40 for index in range(part)]
        else:
            media.append(qwen_item(part[0], len(tokens), 1, part[1]))
            tokens += [IMAGE_TOKEN] * part[1]
    return Driver(Setting(num_blocks=400)).add(1, tokens, SamplingParams(max_tokens=1), media=tuple(media))


def test_the_dearest_of_the_last_steps_counts() -> None:
    costs = EncoderCosts()
    assert costs.seconds(100) == 0.0
    costs.observe(10, 0.0)
    costs.observe(0, 1.0)
    assert costs.seconds(100) == 0.0
    costs.observe(10, 0.02)
    costs.observe(100, 0.1)
    assert costs.seconds(100) == pytest.approx(0.2)
    for _ in range(16):
        costs.observe(100, 0.1)
    assert costs.seconds(100) == pytest.approx(0.1)


def test_a_step_that_encodes_computes_fewer_tokens() -> None:
    without = timed(budget_with(0.0)).grant(request_of(300), 300, 0)
    granted = timed(budget_with(0.001)).grant(request_of(5, ("cat", 15), 280), 300, 0)
    assert MIN_PREFILL_TOKENS < granted < without
    assert MODEL.seconds(4 + granted, 100, 0.0) + 0.015 <= LIMIT_S
    # Nobody waits for a step without streams: it is not limited.
    alone = budget_with(0.001).share(Allowance(256, 0))
    assert alone.grant(request_of(5, ("cat", 15), 280), 300, 0) == 256


def test_what_comes_before_an_image_is_computed_first() -> None:
    budget = budget_with(0.001)
    request, other = request_of(100, ("cat", 60), 40), request_of(("dog", 8), 3)
    allowance = timed(budget)
    assert allowance.grant(request, 200, 0) == 100
    assert allowance.num_left > 0
    assert allowance.grant(other, 11, 0) == 0
    # It takes longer than a step may, however little is computed beside it.
    assert timed(budget).grant(request, 100, 100) == MIN_PREFILL_TOKENS


def test_several_images_are_encoded_beside_streams_if_there_is_time() -> None:
    request = request_of(2, ("cat", 10), 2, ("dog", 10), 2)
    assert timed(budget_with(0.0005)).grant(request, 26, 0) == 26
    assert timed(budget_with(0.003)).grant(request, 26, 0) == 14


def test_time_that_one_row_encodes_is_missing_to_others() -> None:
    budget = budget_with(0.001)
    allowance = timed(budget)
    assert allowance.grant(request_of(("cat", 20)), 20, 0) == 20
    granted = allowance.grant(request_of(300), 300, 0)
    assert MODEL.seconds(4 + 20 + granted, 100, 0.0) + 0.020 <= LIMIT_S
    assert 0 < granted < timed(budget).grant(request_of(300), 300, 0) - 20


def test_images_that_are_never_cut_take_time_too() -> None:
    budget = EncoderBudget(SchedulerConfig(max_num_batched_tokens=256, disable_chunked_mm_input=True))
    budget.costs.observe(1, 0.001)
    allowance = timed(budget)
    assert allowance.grant(request_of(("cat", 20)), 20, 0) == 20
    granted = allowance.grant(request_of(300), 300, 0)
    assert MODEL.seconds(4 + 20 + granted, 100, 0.0) + 0.020 <= LIMIT_S
