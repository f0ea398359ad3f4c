"""Tensors of media in an engine core: each once, for as long as it may, and asked for if they are not there."""

import random
from collections.abc import Sequence

import msgspec
import pytest

from tests.support.engine_bench import Bench
from tests.support.fake_executor import solo_run
from tests.support.media_items import IMAGE_TOKEN, QWEN, qwen_item
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.media_store import MediaStore, media_bytes
from tokenmill_engine.messages import AbortRequests, ClientGone, FinishReason, Hello, MediaItem, SamplingParams

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
SIZE = media_bytes(qwen_item("any", 0).tensors)


def items(*contents: str) -> tuple[MediaItem, ...]:
    return tuple(qwen_item(content, 4 * index) for index, content in enumerate(contents))


def bare(media: Sequence[MediaItem]) -> tuple[MediaItem, ...]:
    """As a front end sends what it has sent before."""
    return tuple(msgspec.structs.replace(item, tensors={}) for item in media)


def held(store: MediaStore, request_id: int, *contents: str) -> tuple[MediaItem, ...]:
    media = store.complete(items(*contents))
    assert media is not None
    store.hold(request_id, media)
    store.check_invariants()
    return media


# --- the store ----------------------------------------------------------------------------------------------------


def test_tensors_are_here_once_however_many_hold_them() -> None:
    store = MediaStore()
    first, second = held(store, 1, "cat", "dog", "cat"), held(store, 2, "dog")
    assert first[0].tensors is first[2].tensors
    assert second[0].tensors is first[1].tensors
    assert store.num_bytes == 2 * SIZE
    store.release(1)
    store.check_invariants()
    assert store.complete(bare(items("dog"))) == items("dog")
    assert store.complete(bare(items("cat"))) is None
    store.release(2)
    store.release(2)
    assert (len(store), store.num_bytes) == (0, 0)


def test_an_item_may_come_once_in_a_message() -> None:
    store = MediaStore()
    both = (items("cat")[0], *bare(items("x", "cat"))[1:])
    assert store.complete(both) == (items("cat")[0], items("x", "cat")[1])
    assert store.complete((*bare(items("cat")), items("x", "cat")[1])) == (items("cat")[0], items("x", "cat")[1])
    assert len(store) == 0


def test_idle_ones_stay_while_there_is_room_and_those_of_the_oldest_requests_go_first() -> None:
    store = MediaStore(3 * SIZE)
    for request_id, content in enumerate(("a", "b", "c")):
        held(store, request_id, content)
    for request_id in (1, 0, 2):
        store.release(request_id)
    held(store, 3, "a")
    store.release(3)
    held(store, 4, "d")
    assert [item.key in store for item in items("a", "b", "c", "d")] == [True, False, True, True]


def test_what_is_held_may_exceed_the_room_and_then_nothing_is_idle() -> None:
    store = MediaStore(2 * SIZE)
    held(store, 1, "a")
    store.release(1)
    held(store, 2, "b", "c", "d")
    assert len(store) == 3
    assert items("a")[0].key not in store
    store.release(2)
    store.check_invariants()
    assert len(store) == 2
    big = MediaStore(SIZE - 1)
    held(big, 1, "a")
    big.release(1)
    assert len(big) == 0


def test_a_key_of_two_contents_gives_neither_the_other_ones() -> None:
    """Somebody's mistake, but of no harm to others: what does not look alike is not shared."""
    store = MediaStore(10 * SIZE)
    held(store, 1, "cat")
    other = msgspec.structs.replace(qwen_item("other", 0, 4, 4), key=items("cat")[0].key)
    completed = store.complete((other,))
    assert completed == (other,)
    store.hold(2, completed)
    store.check_invariants()
    assert store.complete(bare(items("cat"))) == items("cat")


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_requests(seed: int) -> None:
    rng = random.Random(seed)
    store = MediaStore(rng.randrange(6) * SIZE)
    live: list[int] = []
    for request_id in range(200):
        contents = [str(rng.randrange(8)) for _ in range(rng.randrange(4))]
        known = [item.key in store for item in items(*contents)]
        asked = tuple(
            item if rng.random() < 0.5 else lone
            for item, lone in zip(items(*contents), bare(items(*contents)), strict=True)
        )
        came = {item.key for item in asked if item.tensors}
        completed = store.complete(asked)
        assert (completed is None) == any(
            not here and item.key not in came for here, item in zip(known, asked, strict=True)
        )
        if completed is not None:
            assert completed == items(*contents)
            store.hold(request_id, completed)
            live.append(request_id)
        while len(live) > rng.randrange(1, 6):
            store.release(live.pop(rng.randrange(len(live))))
        store.check_invariants()
    for request_id in live:
        store.release(request_id)
    store.check_invariants()


# --- the engine core ----------------------------------------------------------------------------------------------


def prompt(media: Sequence[MediaItem]) -> list[int]:
    return [IMAGE_TOKEN] * (4 * len(media)) + [7, 9]


def answer(media: Sequence[MediaItem], sampling: SamplingParams) -> list[int]:
    return solo_run(prompt(media), sampling, 200, media)[0]


def bench_of(num_items: int = 0, **options: int) -> Bench:
    return Bench(media=QWEN, media_store_bytes=num_items * SIZE, **options)


@pytest.mark.parametrize("num_items", [0, 10])
def test_later_choices_come_without_tensors(num_items: int) -> None:
    bench = bench_of(num_items)
    media = items("cat", "dog")
    ids = [bench.add(0, prompt(media), LONG, media=each) for each in (media, bare(media), bare(media))]
    bench.run()
    assert bench.missing == []
    assert all(bench.tokens[each] == answer(media, LONG) for each in ids)
    assert len(bench.core.media) == min(num_items, 2)


def test_what_is_missing_is_asked_for_and_answered_when_it_comes() -> None:
    """Others are not held up meanwhile."""
    bench = bench_of()
    media = items("cat", "dog")
    lacking = bench.add(2, prompt(media), LONG, media=(media[0], *bare(media)[1:]))
    other = bench.add(1, [1, 2, 3], LONG)
    bench.step()
    assert bench.missing == [(2, [lacking])]
    assert len(bench.core.media) == 0
    bench.run()
    assert bench.tokens[other] == solo_run([1, 2, 3], LONG, 200)[0]
    assert lacking not in bench.tokens
    bench.add(2, prompt(media), LONG, lacking, media=media)
    bench.run()
    assert bench.tokens[lacking] == answer(media, LONG)
    assert bench.missing == [(2, [lacking])]


def test_kept_for_later_requests_as_long_as_there_is_room() -> None:
    bench = bench_of(2)
    for content in ("a", "b"):
        bench.add(0, prompt(items(content)), SHORT, media=items(content))
        bench.run()
    again = bench.add(0, prompt(items("a")), SHORT, media=bare(items("a")))
    bench.add(0, prompt(items("c")), SHORT, media=items("c"))
    bench.run()
    assert bench.tokens[again] == answer(items("a"), SHORT)
    gone = bench.add(0, prompt(items("b")), SHORT, media=bare(items("b")))
    bench.step()
    assert bench.missing == [(0, [gone])]


def test_a_refused_request_leaves_nothing_behind() -> None:
    """Neither one that is too long nor one whose tensors are wrong, which would be everybody's from then on."""
    bench = bench_of(10)
    media = items("cat")
    too_long = bench.add(0, prompt(media) + [1] * 300, SHORT, media=media)
    wrong = msgspec.structs.replace(media[0], tensors=qwen_item("cat", 0, 4, 4).tensors)
    broken = bench.add(0, prompt(media), SHORT, media=(wrong,))
    bench.step()
    assert [bench.finishes[each][0].reason for each in (too_long, broken)] == [FinishReason.ERROR] * 2
    assert len(bench.core.media) == 0
    good = bench.add(0, prompt(media), SHORT, media=media)
    bench.run()
    assert bench.tokens[good] == answer(media, SHORT)


def test_a_wrong_key_does_no_harm_to_others() -> None:
    bench = bench_of(10)
    media = items("cat")
    bench.add(0, prompt(media), SHORT, media=media)
    other = msgspec.structs.replace(qwen_item("large", 0, 4, 4), key=media[0].key)
    bad = bench.add(1, [IMAGE_TOKEN] * 16 + [7, 9], SHORT, media=bare((other,)))
    fine = bench.add(1, prompt(media), SHORT, media=bare(media))
    bench.run()
    assert bench.finishes[bad][0].reason is FinishReason.ERROR
    assert bench.tokens[fine] == answer(media, SHORT)


@pytest.mark.parametrize("end", ["abort", "gone", "hello"])
def test_whatever_ends_requests_lets_their_media_go(end: str) -> None:
    bench = bench_of()
    running = bench.add(0, prompt(items("a")), LONG, media=items("a"))
    bench.step()
    waiting = bench.add(0, prompt(items("b")), LONG, media=items("b"))
    awaited = bench.add(0, prompt(items("c")), LONG, media=bare(items("c")))
    kept = bench.add(1, prompt(items("a")), LONG, media=items("a"))
    message: AbortRequests | ClientGone | Hello
    message = {"abort": AbortRequests([running, waiting, awaited]), "gone": ClientGone(0, 0), "hello": Hello(0, 0)}[end]
    bench.core.handle(message)
    assert len(bench.core.media) == 1
    bench.run()
    assert bench.tokens[kept] == answer(items("a"), LONG)
    assert len(bench.core.media) == 0


def test_a_failed_step_lets_them_go() -> None:
    bench = bench_of()
    media = items("a")
    bench.executor.unreadable.add(media[0].tensors["pixel_values"].data)
    failed = bench.add(0, prompt(media), LONG, media=media)
    bench.run()
    assert bench.finishes[failed][0].reason is FinishReason.ERROR
    assert len(bench.core.media) == 0


def test_a_request_that_comes_again_counts_once() -> None:
    """For the balancing of several engine cores, which compares what was sent with what has come."""
    bench = bench_of(num_engines=2)
    bench.core.handle(Hello(0, 0))
    media = items("a")
    request_id = make_request_id(0, 0, 99)
    bench.add(0, prompt(media), SHORT, request_id, media=bare(media))
    bench.step()
    assert bench.load[0].num_received == 1
    bench.add(0, prompt(media), SHORT, request_id, media=media)
    bench.run()
    assert bench.load[0].num_received == 1
    assert bench.tokens[request_id] == answer(media, SHORT)
