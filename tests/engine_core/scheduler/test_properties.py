"""Random traffic on tiny pools: every request gets exactly the tokens it would get alone, and nothing leaks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_executor import VOCAB_SIZE, solo_run
from tests.support.media_items import IMAGE_TOKEN, qwen_item
from tests.support.scheduling import Driver, Setting
from tests.support.simulated_device import CPU_135M
from tokenmill_engine.messages import FinishReason, MediaItem, SamplingParams, SharedObject
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.scheduler.cost_model import work_of

SHARED = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    sampling: SamplingParams
    priority: int
    cache_salt: str | None
    abort_after: int | None
    media: tuple[MediaItem, ...] = ()
    known: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """As in `solo_run`."""


LARGEST_IMAGE = 6


@st.composite
def images(draw: st.DrawFn, num_tokens: int, whole_limit: int) -> tuple[MediaItem, ...]:
    """Images in a prompt of `num_tokens`, often the same ones."""
    media = []
    end = 0
    while (start := end + draw(st.integers(0, 4))) < num_tokens and draw(st.booleans()):
        size = draw(st.integers(1, min(LARGEST_IMAGE, whole_limit, num_tokens - start)))
        media.append(qwen_item(f"{draw(st.integers(0, 2))} {size}", start, 1, size))
        end = start + size
    return tuple(media)


@st.composite
def arrivals(draw: st.DrawFn, longest: int, largest_image: int = 0) -> Arrival:
    shared = SHARED[: draw(st.integers(0, min(len(SHARED), longest - 2)))]
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=max(1, longest - 1 - len(shared))))
    prompt = [*shared, *own]
    media = draw(images(len(prompt), largest_image)) if largest_image else ()
    for item in media:
        prompt[item.offset : item.offset + item.num_tokens] = [IMAGE_TOKEN] * item.num_tokens
    sampling = SamplingParams(
        max_tokens=draw(st.none() | st.integers(0, 12)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
    )
    foreseen = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)
    return Arrival(
        step=draw(st.integers(0, 12)),
        prompt=prompt,
        sampling=sampling,
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from([None, None, "salt"])),
        abort_after=draw(st.none() | st.none() | st.integers(0, 10)),
        media=media,
        known={} if sampling.logprobs is not None else draw(st.dictionaries(st.integers(0, 9), foreseen, max_size=3)),
    )


def erratic_cost(plan: StepPlan) -> float:
    """Seconds of a step on a device that often waits for something, and is not always looked at."""
    return CPU_135M.seconds(work_of(plan)) * (0.0, 1.0, 1.1, 0.9, 1.0, 7.0)[plan.step % 6]


@st.composite
def traffic(draw: st.DrawFn, num_stages: int = 1, with_images: bool = False) -> tuple[Setting, list[Arrival]]:
    setting = Setting(
        num_groups=draw(st.sampled_from([1, 1, 2])),
        block_size=draw(st.sampled_from([1, 2, 4])),
        max_num_seqs=draw(st.integers(1, 6)),
        budget=draw(st.sampled_from([1, 3, 8, 64])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        depth=draw(st.sampled_from([1, 2, 3])),
        num_stages=num_stages,
        caching=draw(st.booleans()),
        explicit_budget=draw(st.booleans()),
        target_itl_ms=draw(st.sampled_from([None, None, 1.0, 12.0])),
        prefill_costs=draw(st.sampled_from([(), ((8, 0.01), (64, 0.02))])),
        step_cost=erratic_cost,
    )
    if with_images:
        setting.whole_images = draw(st.booleans())
        setting.encoder_budget = draw(st.sampled_from([LARGEST_IMAGE, LARGEST_IMAGE + 1, 15]))
        setting.encoder_cache = draw(st.sampled_from([LARGEST_IMAGE, LARGEST_IMAGE + 2, 15]))
    largest_image = min(LARGEST_IMAGE, setting.budget if setting.whole_images else LARGEST_IMAGE)
    tokens_per_request = draw(st.integers(8, 30))
    setting.num_blocks = -(-tokens_per_request // setting.block_size) * setting.num_groups
    longest = setting.num_blocks // setting.num_groups * setting.block_size
    some = arrivals(longest, largest_image if with_images else 0)
    return setting, draw(st.lists(some, min_size=1, max_size=10))


def check_told(driver: Driver, request_id: int, arrival: Arrival, aborted: bool) -> None:
    told = driver.told[request_id]
    tokens, reason = solo_run(arrival.prompt, arrival.sampling, driver.max_model_len, arrival.media, arrival.known)
    num_prompt = len(arrival.prompt)
    prompt_positions = list(range(1, num_prompt)) if arrival.sampling.prompt_logprobs is not None else []
    positions = range(num_prompt, num_prompt + len(told.tokens))
    assert told.logprob_positions == (list(positions) if arrival.sampling.logprobs is not None else [])
    if aborted:
        assert told.finishes == []
        assert told.tokens == tokens[: len(told.tokens)]
        assert told.prompt_logprob_positions == prompt_positions[: len(told.prompt_logprob_positions)]
    else:
        assert told.finishes == [FinishReason(reason)]
        assert told.tokens == tokens
        assert told.prompt_logprob_positions == prompt_positions


def stamp(request_id: int) -> bytes:
    return request_id.to_bytes(16, "little")


def shared_by(request_id: int, media: tuple[MediaItem, ...]) -> tuple[MediaItem, ...]:
    """The same images in shared memory, as long as the request is open."""
    return tuple(msgspec.structs.replace(item, shared=SharedObject(0, 0, 0, stamp(request_id))) for item in media)


def check_traffic(case: tuple[Setting, list[Arrival]], *, shares: bool = False) -> None:
    """`shares`: images are in shared memory, which is written over as soon as their request has ended."""
    setting, requests = case
    driver = Driver(setting)
    aborted = set()
    aborts: dict[int, list[int]] = {}
    step = 0
    while True:
        for request_id, arrival in enumerate(requests):
            if arrival.step == step:
                driver.add(
                    request_id,
                    arrival.prompt,
                    arrival.sampling,
                    arrival.priority,
                    0.0,
                    arrival.cache_salt,
                    shared_by(request_id, arrival.media) if shares else arrival.media,
                    arrival.known,
                )
                if arrival.abort_after is not None:
                    aborts.setdefault(step + arrival.abort_after, []).append(request_id)
        for request_id in aborts.pop(step, []):
            if driver.abort(request_id) is not None:
                aborted.add(request_id)
        ended = aborted | {request_id for request_id, told in driver.told.items() if told.finishes}
        driver.executor.gone.update(map(stamp, ended))
        progressed = driver.step()
        step += 1
        assert step < 20_000
        if not progressed and step > 12 and not aborts:
            break
    assert driver.scheduler.num_unfinished == 0
    assert driver.kv.pool.usage == 0.0
    load = driver.scheduler.load
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert driver.executor.most_kept <= setting.encoder_cache
    for request_id, arrival in enumerate(requests):
        check_told(driver, request_id, arrival, request_id in aborted)


@settings(max_examples=50)
@given(traffic())
def test_every_request_is_answered_as_if_it_were_alone(case: tuple[Setting, list[Arrival]]) -> None:
    check_traffic(case)


@pytest.mark.slow
@settings(max_examples=1000)
@given(traffic())
def test_every_request_is_answered_as_if_it_were_alone_at_length(case: tuple[Setting, list[Arrival]]) -> None:
    check_traffic(case)


@settings(max_examples=50)
@given(st.integers(2, 4).flatmap(lambda num_stages: traffic(num_stages)))
def test_every_request_is_answered_as_if_it_were_alone_by_stages(case: tuple[Setting, list[Arrival]]) -> None:
    check_traffic(case)


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.integers(2, 4).flatmap(lambda num_stages: traffic(num_stages)))
def test_every_request_is_answered_as_if_it_were_alone_by_stages_at_length(
    case: tuple[Setting, list[Arrival]],
) -> None:
    check_traffic(case)


WITH_IMAGES = st.sampled_from([1, 1, 2, 3]).flatmap(lambda num_stages: traffic(num_stages, with_images=True))


@settings(max_examples=50)
@given(WITH_IMAGES)
def test_every_request_is_answered_as_if_it_were_alone_with_images(case: tuple[Setting, list[Arrival]]) -> None:
    check_traffic(case)


@settings(max_examples=50)
@given(WITH_IMAGES)
def test_every_request_is_answered_as_if_it_were_alone_with_images_that_others_shared(
    case: tuple[Setting, list[Arrival]],
) -> None:
    """Requests with the same images use what one of them has brought, which may be gone before it is looked at."""
    check_traffic(case, shares=True)


@pytest.mark.slow
@settings(max_examples=800)
@given(WITH_IMAGES)
def test_every_request_is_answered_as_if_it_were_alone_with_images_at_length(
    case: tuple[Setting, list[Arrival]],
) -> None:
    """Of its own, and shared; to think of the traffic takes as long as to check it once."""
    check_traffic(case)
    check_traffic(case, shares=True)
