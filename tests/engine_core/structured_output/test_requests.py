"""When text that has to follow is computed at once. What comes of it is tested with a whole engine core."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.engine_core.worker.conftest import tiny_engine_config
from tests.support.grammars import spec
from tokenmill_engine.config.engine import DeviceConfig
from tokenmill_engine.messages import AddRequest, FinishReason, SamplingParams
from tokenmill_engine.outputs import SlotStart, StepPlan
from tokenmill_engine.request import Request, RequestLimits, build_request
from tokenmill_engine.structured_output.requests import StructuredRequests

NUM_ROWS = 6
LIMITS = RequestLimits(max_model_len=512, vocab_size=500, eos_token_ids=(2,))


def request(request_id: int, regex: str | None) -> Request:
    sampling = SamplingParams(max_tokens=60, structured=None if regex is None else spec("regex", regex))
    message = AddRequest(request_id, "", np.array([5, 6], "<i4").tobytes(), sampling, 0.0)
    return build_request(message, LIMITS, random.Random(0))


def first_plan(requests: list[Request]) -> StepPlan:
    """In which all begin and yield a token."""
    starts = [
        SlotStart(slot, each.request_id, each.prompt_token_ids, 2, 0, ([slot],), each.sampling, each.stop_token_ids)
        for slot, each in enumerate(requests)
    ]
    slots = np.arange(len(requests), dtype=np.int32)
    ones = np.ones(len(requests), np.int32)
    return StepPlan(1, slots, 2 * ones, 0 * ones, ones.astype(np.bool_), 0, starts=starts)


Admit = Callable[[str, list[str]], tuple[StructuredRequests, list[Request]]]


@pytest.fixture
def admitted() -> Iterator[Admit]:
    """Requests with these grammars among NUM_ROWS, on a device of that kind."""
    made: list[StructuredRequests] = []

    def admit(kind: str, regexes: list[str]) -> tuple[StructuredRequests, list[Request]]:
        woken = threading.Event()
        config = replace(tiny_engine_config(), device=DeviceConfig(kind=kind))  # type: ignore[arg-type]
        structured = StructuredRequests(config, woken.set)
        made.append(structured)
        regexes_or_none = [*regexes, *[None] * (NUM_ROWS - len(regexes))]
        requests = [request(number, regex) for number, regex in enumerate(regexes_or_none)]
        waiting = [
            each for each in requests if (wanted := each.sampling.structured) and not structured.admit(each, wanted)
        ]
        while waiting:
            assert woken.wait(60)
            woken.clear()
            for ready, error in structured.ready():
                assert error is None
                waiting.remove(ready)
        return structured, requests

    yield admit
    for structured in made:
        structured.close()


@pytest.mark.parametrize(
    ("kind", "regexes", "jumps"),
    [
        ("cpu", ["ab[0-9]"], True),
        ("cuda", ["ab[0-9]"], False),
        ("cuda", ["abgd[0-9]"], True),
        ("cuda", ["ab[0-9]", "gd[0-9]"], True),
        ("cuda", ["[ab]x", "[0-9]y"], False),
    ],
)
def test_on_a_gpu_they_have_to_be_enough_for_the_step(
    kind: str,
    regexes: list[str],
    jumps: bool,
    admitted: Admit,
) -> None:
    """Of six rows. If they are not, they follow all the same, one by one."""
    structured, requests = admitted(kind, regexes)
    plan = structured.masked(first_plan(requests), tokens_in_flight=False)
    assert plan.masks is not None
    assert plan.masks.rows.tolist() == list(range(len(regexes)))
    is_single = np.bitwise_count(plan.masks.bits.view(np.uint32)).sum(axis=1) == 1
    assert is_single.all() == (not regexes[0].startswith("["))
    assert bool(structured.known_tokens()) == jumps
    assert structured.known_tokens() == {}


def test_what_was_forced_stays_so(
    admitted: Admit,
) -> None:
    """Whether it is computed at once or not."""
    structured, requests = admitted("cuda", ["abcdefgh[0-9]"])
    plan = first_plan(requests)
    found: list[int] = []
    known: list[int] = []
    while True:
        masks = structured.masked(plan, tokens_in_flight=False).masks
        assert masks is not None
        if np.bitwise_count(masks.bits.view(np.uint32)).sum() > 1:
            break
        known = known or structured.known_tokens()[0]
        (word,) = masks.bits[0].nonzero()[0].tolist()
        found.append(32 * word + int(masks.bits.view(np.uint32)[0, word]).bit_length() - 1)
        structured.take(np.array([0]), np.array([1], np.int32), np.array(found[-1:], np.int32))
        plan = replace(plan, step=plan.step + 1, starts=[])
    assert len(found) > 3
    assert found[1:] == known
    assert structured.forget(0, FinishReason.ABORT) is None


def test_long_texts_are_told_in_parts_and_no_more_than_an_output_may_have(admitted: Admit) -> None:
    structured, requests = admitted("cpu", ["(ab0x){300}"])
    plan, num_taken = first_plan(requests), 0
    while num_taken < 60:
        masks = structured.masked(plan, tokens_in_flight=False).masks
        assert masks is not None
        (word,) = masks.bits[0].nonzero()[0].tolist()
        token_ids = [32 * word + int(masks.bits.view(np.uint32)[0, word]).bit_length() - 1]
        token_ids += structured.known_tokens().get(0, [])
        assert len(token_ids) <= min(256, 60 - num_taken)
        structured.take(np.array([0]), np.array([len(token_ids)], np.int32), np.array(token_ids, np.int32))
        num_taken += len(token_ids)
        plan = replace(plan, step=plan.step + 1, starts=[])
    assert num_taken == 60
    assert structured.failures() == []
