"""Which images a step encodes, and where chunks end because of them. No device, no model."""

import dataclasses

import msgspec

from tests.support.fake_executor import solo_run
from tests.support.media_items import IMAGE_TOKEN, qwen_item
from tests.support.scheduling import Driver, Setting
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.messages import FinishReason, MediaItem, SamplingParams, SharedObject
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.request import Request, RequestState
from tokenmill_engine.scheduler.budget import Allowance, TimedAllowance
from tokenmill_engine.scheduler.cost_model import StepCostModel
from tokenmill_engine.scheduler.encoder_budget import EncoderBudget, comparable_s, encoder_key

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


def prompt_of(*parts: int | str | tuple[str, int], first: int = 0) -> tuple[list[int], tuple[MediaItem, ...]]:
    """Text of so many tokens, and images: of 4 placeholders, or of as many as said."""
    tokens: list[int] = []
    media: list[MediaItem] = []
    for part in parts:
        if isinstance(part, int):
            tokens += [(first + len(tokens) + index) % 40 for index in range(part)]
            continue
        content, size = part if isinstance(part, tuple) else (part, 4)
        media.append(qwen_item(content, len(tokens), 1, size))
        tokens += [IMAGE_TOKEN] * size
    return tokens, tuple(media)


def add(
    driver: Driver, request_id: int, *parts: int | str | tuple[str, int], sampling: SamplingParams = SHORT
) -> Request:
    tokens, media = prompt_of(*parts)
    return driver.add(request_id, tokens, sampling, media=media)


def next_plan(driver: Driver) -> StepPlan:
    driver.step()
    return driver.plans[-1]


def encoded(plan: StepPlan) -> list[int]:
    """Tokens of each image that the step encodes."""
    return [each.num_tokens for each in plan.media.encode] if plan.media is not None else []


def replaced(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """(row, first token of the row, tokens, first row of the image) of each piece of an image."""
    pieces = plan.media.rows if plan.media is not None else []
    return [(piece.row, piece.start, piece.count, piece.first) for piece in pieces]


def finish(driver: Driver) -> None:
    """Everybody gets what they would get alone."""
    driver.run()
    for request_id, told in driver.told.items():
        if not told.finishes:
            continue
        assert told.finishes == [FinishReason.LENGTH], told.message
        request = driver.requests[request_id]
        expected, _ = solo_run(request.prompt_token_ids.tolist(), request.sampling, driver.max_model_len, request.media)
        assert told.tokens == expected


def test_text_knows_nothing_of_images() -> None:
    driver = Driver(Setting())
    add(driver, 1, 9)
    finish(driver)
    assert all(plan.media is None for plan in driver.plans)
    assert driver.plans[0].starts[0].media == ()


def test_the_largest_image_fits_into_each_limit() -> None:
    config = SchedulerConfig(max_num_batched_tokens=10, max_num_encoder_tokens=30, encoder_cache_tokens=20)
    assert config.max_item_tokens == 20
    assert dataclasses.replace(config, max_num_encoder_tokens=15).max_item_tokens == 15
    assert dataclasses.replace(config, disable_chunked_mm_input=True).max_item_tokens == 10


def test_images_are_encoded_in_the_step_that_computes_their_placeholders() -> None:
    driver = Driver(Setting(depth=1))
    add(driver, 1, 3, "cat", 2, "dog", 1)
    plan = next_plan(driver)
    assert encoded(plan) == [4, 4]
    assert replaced(plan) == [(0, 3, 4, 0), (0, 9, 4, 0)]
    assert [(place.offset, place.num_tokens) for place in plan.starts[0].media] == [(3, 4), (9, 4)]
    finish(driver)
    assert all(plan.media is None for plan in driver.plans[1:])


def test_an_image_is_encoded_once_for_all_chunks_that_lead_through_it() -> None:
    driver = Driver(Setting(budget=4, depth=1))
    add(driver, 1, 2, ("cat", 7), 2)
    plans = [next_plan(driver) for _ in range(3)]
    assert [encoded(plan) for plan in plans] == [[7], [], []]
    assert [replaced(plan) for plan in plans] == [[(0, 2, 2, 0)], [(0, 0, 4, 2)], [(0, 0, 1, 6)]]
    finish(driver)


def test_a_chunk_ends_before_the_image_that_exceeds_the_budget_of_the_step() -> None:
    driver = Driver(Setting(encoder_budget=6, depth=1))
    add(driver, 1, 3, "cat", 2, "dog", 1)
    plans = [next_plan(driver) for _ in range(2)]
    assert [plan.num_tokens for plan in plans] == [9, 5]
    assert [encoded(plan) for plan in plans] == [[4], [4]]
    finish(driver)


def test_beside_streams_the_budget_of_the_step_holds_too() -> None:
    """Though the step may compute more tokens than it may encode."""
    driver = Driver(Setting(budget=8, encoder_budget=6, depth=1))
    add(driver, 1, 1, sampling=LONG)
    driver.step()
    add(driver, 2, ("cat", 1), ("dog", 6))
    assert [encoded(next_plan(driver)) for _ in range(2)] == [[1], [6]]
    finish(driver)


def test_a_chunk_ends_before_the_image_that_exceeds_the_cache() -> None:
    driver = Driver(Setting(encoder_cache=6, depth=1))
    add(driver, 1, 3, "cat", 2, "dog", 1)
    plans = [next_plan(driver) for _ in range(2)]
    assert [plan.num_tokens for plan in plans] == [9, 5]
    assert plans[1].media is not None
    assert plans[1].media.free == [0]
    finish(driver)
    assert driver.executor.most_kept == 4


def test_equal_images_are_encoded_once() -> None:
    driver = Driver(Setting(depth=1))
    add(driver, 1, 3, "cat", "cat", 2)
    add(driver, 2, "cat", 5)
    assert encoded(next_plan(driver)) == [4]
    finish(driver)
    add(driver, 3, 6, "cat", 1)
    assert encoded(next_plan(driver)) == []
    finish(driver)


def test_what_a_step_looks_at_does_not_give_way_in_it() -> None:
    driver = Driver(Setting(encoder_cache=8, caching=False, depth=1))
    for request_id, content in enumerate(("cat", "dog")):
        add(driver, request_id, content)
        finish(driver)
    add(driver, 2, "cow")
    add(driver, 3, "cat")
    plan = next_plan(driver)
    assert plan.media is not None
    assert (plan.media.free, encoded(plan)) == ([1], [4])
    finish(driver)


def test_what_a_victim_holds_is_free_for_those_who_stay() -> None:
    driver = Driver(Setting())
    victim, other = add(driver, 1, ("cat", 8), 1), add(driver, 2, ("dog", 8), 1)
    budget = EncoderBudget(SchedulerConfig(encoder_cache_tokens=8))
    budget.cache.add(victim.request_id, encoder_key(victim.media[0]), 8)
    assert budget.share(Allowance(6, 0)).grant(other, 9, 0) == 0
    assert budget.share(Allowance(6, 0), [victim]).grant(other, 9, 0) == 6


def test_choices_of_one_prompt_share_an_image() -> None:
    driver = Driver(Setting(caching=False))
    for request_id in range(4):
        add(driver, request_id, 3, "cat", 2)
    finish(driver)
    assert driver.executor.encoded == [0]


def test_a_prefix_that_covers_an_image_needs_no_encoding() -> None:
    driver = Driver(Setting(encoder_cache=8, depth=1))
    add(driver, 1, 4, "cat", 3)
    finish(driver)
    add(driver, 2, ("cow", 8), 2)
    finish(driver)
    request = add(driver, 3, 4, "cat", 6)
    plan = next_plan(driver)
    assert request.num_cached_tokens == 8
    assert plan.media is None
    finish(driver)


def test_a_prefix_that_ends_within_an_image_has_it_encoded_for_the_rest() -> None:
    driver = Driver(Setting(encoder_cache=8, depth=1))
    add(driver, 1, 2, ("cat", 8), 1)
    finish(driver)
    add(driver, 2, ("cow", 8), 2)
    finish(driver)
    request = add(driver, 3, 2, ("cat", 8))
    plan = next_plan(driver)
    assert request.num_cached_tokens == 8
    assert (encoded(plan), replaced(plan)) == ([8], [(0, 0, 2, 6)])
    finish(driver)


def test_other_images_with_equal_placeholders_share_no_blocks() -> None:
    driver = Driver(Setting(depth=1))
    add(driver, 1, "cat", 5)
    finish(driver)
    other, same = add(driver, 2, "dog", 5), add(driver, 3, "cat", 5)
    finish(driver)
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)
    assert driver.told[1].tokens == driver.told[3].tokens != driver.told[2].tokens


def test_a_prompt_that_ends_with_a_placeholder_waits_for_its_image_like_any_other() -> None:
    """The last token alone would look like a decode."""
    driver = Driver(Setting(budget=6, encoder_cache=4, depth=1))
    add(driver, 1, 4, "cat")
    add(driver, 2, 1, "dog")
    plans = [next_plan(driver) for _ in range(2)]
    assert [plan.num_scheduled.tolist() for plan in plans] == [[6], [2, 1]]
    assert plans[1].num_decodes == 0
    finish(driver)


def test_the_last_placeholder_alone_is_looked_at() -> None:
    driver = Driver(Setting(budget=7, depth=1))
    add(driver, 1, 4, "cat")
    plans = [next_plan(driver) for _ in range(2)]
    assert [replaced(plan) for plan in plans] == [[(0, 4, 3, 0)], [(0, 0, 1, 3)]]
    assert plans[1].num_decodes == 1
    finish(driver)


def test_who_waits_for_room_is_not_overtaken_by_another_image_but_by_text() -> None:
    driver = Driver(Setting(budget=6, encoder_cache=9, depth=1))
    add(driver, 1, ("cat", 8), 1)
    driver.step()
    add(driver, 2, 1, ("dog", 6))
    add(driver, 3, 1, ("cow", 1))
    plan = next_plan(driver)  # There would be room for the cow.
    assert (plan.num_scheduled.tolist(), encoded(plan)) == ([3, 1, 1], [])
    assert encoded(next_plan(driver)) == [6]
    finish(driver)


def test_running_text_goes_on_while_an_image_waits() -> None:
    driver = Driver(Setting(budget=8, encoder_cache=8, depth=1))
    add(driver, 1, 7, ("cat", 8), 1)
    add(driver, 2, 7, ("dog", 8), 1)
    driver.step()
    text = add(driver, 3, 2)
    finish(driver)
    assert text.num_preemptions == 0


def test_beside_streams_a_step_encodes_one_image_or_as_much_as_it_computes() -> None:
    driver = Driver(Setting(budget=12, depth=1))
    add(driver, 1, ("cat", 8), ("dog", 8), 1)
    assert encoded(next_plan(driver)) == [8, 8]
    finish(driver)
    add(driver, 2, 1, sampling=LONG)
    driver.step()
    add(driver, 3, ("cow", 8), ("hen", 8), 2)
    assert [encoded(next_plan(driver)) for _ in range(2)] == [[8], [8]]
    add(driver, 4, ("big", 30), 2)
    assert encoded(next_plan(driver)) == [30]
    finish(driver)


def test_the_time_of_a_step_that_encodes_says_nothing_of_its_tokens() -> None:
    driver = Driver(Setting(depth=1))
    add(driver, 1, 3, "cat")
    first, second = next_plan(driver), next_plan(driver)
    assert (comparable_s(first, 2.5), comparable_s(second, 2.5)) == (0.0, 2.5)


def test_an_abort_lets_go_of_the_image() -> None:
    driver = Driver(Setting(budget=6, encoder_cache=8))
    add(driver, 1, 4, ("cat", 8))
    driver.step()
    driver.abort(1)
    add(driver, 2, ("dog", 8), 3)
    finish(driver)
    assert driver.told[2].tokens


def test_a_preempted_request_has_its_images_encoded_again_if_they_had_to_give_way() -> None:
    driver = Driver(Setting(num_blocks=8, block_size=4, max_num_seqs=4, encoder_cache=4, caching=False))
    for request_id, content in enumerate(("cat", "dog", "cow")):
        add(driver, request_id, content, sampling=LONG)
    finish(driver)
    assert driver.scheduler.counters.num_preemptions > 0
    assert len(driver.executor.encoded) > 3


def test_an_image_that_cannot_be_encoded_fails_its_requests_alone() -> None:
    driver = Driver(Setting())
    bad = add(driver, 1, 3, "cat", 2)
    driver.executor.unreadable.add(bad.media[0].tensors["pixel_values"].data)
    add(driver, 2, 3, "dog", 2)
    add(driver, 3, 2, "cat", 2)
    driver.run()
    assert [driver.told[request_id].finishes for request_id in (1, 2, 3)] == [
        [FinishReason.ERROR],
        [FinishReason.LENGTH],
        [FinishReason.ERROR],
    ]
    driver.executor.unreadable.clear()
    add(driver, 4, 3, "cat", 2)
    driver.told = {4: driver.told[4]}
    finish(driver)


def test_a_step_that_fails_takes_its_images_along() -> None:
    driver = Driver(Setting())
    driver.executor.failing_steps.add(1)
    add(driver, 1, 3, "cat", 2)
    driver.run()
    assert driver.told[1].finishes == [FinishReason.ERROR]
    add(driver, 2, 3, "cat", 2)
    driver.told = {2: driver.told[2]}
    finish(driver)
    assert driver.executor.encoded == [0, 1]


def test_what_a_failed_step_should_have_freed_is_freed_by_a_later_one() -> None:
    driver = Driver(Setting(encoder_cache=4, depth=1))
    add(driver, 1, "cat")
    finish(driver)
    driver.executor.failing_steps.add(len(driver.plans) + 1)
    add(driver, 2, "dog")
    driver.run()
    failed = driver.plans[-1].media
    assert failed is not None
    assert failed.free == [0]
    add(driver, 3, "cow")
    later = next_plan(driver).media
    assert later is not None
    assert sorted(later.free) == [0, 1]


def add_shared(driver: Driver, request_id: int, *parts: int | str | tuple[str, int]) -> bytes:
    """A request with images in shared memory; returns what marks them."""
    tokens, media = prompt_of(*parts)
    stamp = request_id.to_bytes(16, "little")
    shared = tuple(msgspec.structs.replace(item, shared=SharedObject(0, 4096, 10, stamp)) for item in media)
    driver.add(request_id, tokens, SHORT, media=shared)
    return stamp


def test_who_brought_an_image_that_is_gone_fails_and_others_have_it_encoded_again() -> None:
    driver = Driver(Setting(depth=1))
    stamps = [add_shared(driver, request_id, 2 + request_id, "cat", 2) for request_id in range(3)]
    driver.executor.gone.add(stamps[0])
    plan = next_plan(driver)
    assert plan.media is not None
    assert [(each.shared.stamp if each.shared is not None else None) for each in plan.media.encode] == [stamps[0]]
    assert driver.told[0].finishes == [FinishReason.ERROR]
    assert [driver.requests[request_id].state for request_id in (1, 2)] == [RequestState.PREEMPTED] * 2
    plan = next_plan(driver)
    assert encoded(plan) == [4]
    del driver.told[0]
    finish(driver)
    assert driver.scheduler.counters.num_preemptions == 0


def test_a_row_fails_for_an_image_of_its_own_though_it_lacks_another_ones_too() -> None:
    driver = Driver(Setting(depth=1))
    stamps = [add_shared(driver, 0, "cat", 2), add_shared(driver, 1, "cat", 2, "dog")]
    driver.executor.gone.update(stamps)
    driver.run()
    assert [driver.told[request_id].finishes for request_id in range(2)] == [[FinishReason.ERROR]] * 2


def test_a_step_that_fails_as_a_whole_fails_who_shared_images_too() -> None:
    driver = Driver(Setting(depth=1))
    for request_id in range(2):
        add_shared(driver, request_id, "cat", 2)
    driver.executor.failing_steps.add(1)
    driver.run()
    assert [driver.told[request_id].finishes for request_id in range(2)] == [[FinishReason.ERROR]] * 2


class TestWhole:
    """No image is computed in chunks."""

    def test_what_does_not_fit_into_the_step_ends_before_the_image(self) -> None:
        driver = Driver(Setting(budget=8, whole_images=True, depth=1))
        add(driver, 1, 6, "cat", 2)
        assert [next_plan(driver).num_tokens for _ in range(2)] == [6, 6]
        finish(driver)

    def test_an_image_that_was_begun_by_the_prefix_cache_may_be_ended(self) -> None:
        driver = Driver(Setting(whole_images=True, depth=1))
        add(driver, 1, 2, ("cat", 8), 1)
        finish(driver)
        request = add(driver, 2, 2, ("cat", 8))
        assert next_plan(driver).num_tokens == 2
        assert request.num_cached_tokens == 8
        finish(driver)

    def test_an_image_larger_than_what_is_left_beside_streams_gets_its_tokens_all_the_same(self) -> None:
        driver = Driver(Setting(budget=64, explicit_budget=False, target_itl_ms=1.0, whole_images=True, depth=1))
        add(driver, 1, 2, sampling=LONG)
        driver.step()
        add(driver, 2, ("cat", 50), 1)
        plan = next_plan(driver)
        assert plan.num_scheduled.tolist() == [1, 50]
        finish(driver)

    def test_a_row_that_gets_no_time_waits(self) -> None:
        """Others had the tokens that a step may always compute, and its time is up: nothing is granted in front of
        the image either."""
        driver = Driver(Setting())
        first, second = add(driver, 1, 32), add(driver, 2, 3, "cat", 1)
        budget = EncoderBudget(SchedulerConfig(max_num_batched_tokens=64, disable_chunked_mm_input=True))
        model = StepCostModel(64, ((8, 0.01), (64, 0.02)))
        allowance = budget.share(TimedAllowance(64, 1, 10, 0.001, model))
        assert allowance.grant(first, 32, 0) == 32
        assert allowance.num_left > 0
        assert allowance.grant(second, 8, 0) == 0

    def test_nobody_gets_ahead_of_an_image_that_needs_the_tokens_of_those_who_stream(self) -> None:
        driver = Driver(Setting(budget=8, whole_images=True, depth=1))
        for request_id in range(3):
            add(driver, request_id, 1, sampling=LONG)
        driver.step()
        image, text = add(driver, 4, ("cat", 7)), add(driver, 5, 2)
        driver.step()
        assert (image.slot, text.slot) == (-1, -1)
        finish(driver)
