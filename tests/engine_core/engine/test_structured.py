"""Requests with grammars in an engine core over a real worker: nothing of how they are scheduled shows."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_SLOTS, tiny_engine_config
from tests.support.core_requests import CoreRequests
from tests.support.generations import prompts
from tests.support.grammars import spec
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, SchedulerConfig
from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_engine.engine import Executor
from tokenmill_engine.errors import EngineError
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import AbortRequests, FinishReason, SamplingParams, StructuredSpec
from tokenmill_engine.outputs import StepHandle, StepPlan, StepResult, TokenMasks
from tokenmill_engine.structured_output.grammar import GrammarError, Matcher
from tokenmill_engine.vocabulary.vocabulary import read_vocabulary

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 5]}}, "required": ["b"]}
RECORD = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 4},
        "is_complete": {"type": "boolean"},
        "kind": {"enum": ["residential", "commercial"]},
    },
    "required": ["first_name", "is_complete", "kind"],
}
WANTED: list[StructuredSpec | None] = [
    None,
    spec("regex", "[a-f]{3,9}-[0-9]{2}"),
    spec("json", SCHEMA, any_whitespace=False),
    spec("choice", ["one", "two", "seven"]),
    None,
    spec("regex", "(ab|c){40,}"),
    spec("json", RECORD, any_whitespace=False),
]
TEMPERATURES = (0.0, 0.9, 1.3, 2.0, 1.0, 0.7, 1.1)


@contextmanager
def running_core(
    *,
    ahead: bool,
    budget: int = 512,
    num_blocks: int = 64,
    jumps: bool = True,
    device: DeviceConfig | None = None,
) -> Iterator[CoreRequests]:
    config = tiny_engine_config(
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(NUM_SLOTS, budget, explicit_budget=True, async_scheduling=ahead),
    )
    config = replace(config, structured_output=StructuredOutputConfig(jump_forward=jumps))
    config = config if device is None else replace(config, device=device)
    executor = UniprocExecutor(config)
    core = CoreRequests(config, executor, executor.initialize())
    try:
        yield core
    finally:
        core.core.shutdown()


@pytest.fixture
def core() -> Iterator[CoreRequests]:
    with running_core(ahead=True) as core:
        yield core


def text(token_ids: list[int]) -> str:
    """Of an output that has come to its end."""
    model = tiny_engine_config().model
    vocabulary = read_vocabulary(model.tokenizer_path, model.architecture.vocab_size, model.eos_token_ids)
    return b"".join(vocabulary.token_bytes[token_id] for token_id in token_ids).decode()


def read_tokens(text: str) -> list[int]:
    model = tiny_engine_config().model
    vocabulary = read_vocabulary(model.tokenizer_path, model.architecture.vocab_size, model.eos_token_ids)
    return vocabulary.encode(text)


def generate(core: CoreRequests, first: int) -> list[list[int]]:
    """Their ids begin with `first`."""
    ids = [
        core.add(
            first + number,
            prompt,
            SamplingParams(
                temperature=temperature, seed=number, max_tokens=60, ignore_eos=wanted is None, structured=wanted
            ),
        )
        for number, (prompt, wanted, temperature) in enumerate(
            zip(prompts()[: len(WANTED)], WANTED, TEMPERATURES, strict=True), start=1
        )
    ]
    told = core.run_until_finished(ids)
    outputs = [each.tokens for each in told]
    assert [len(each.finishes) for each in told] == [1] * len(ids)
    assert told[1].finishes == told[2].finishes == told[3].finishes == [FinishReason.STOP]
    assert set(json.loads(text(outputs[2]))) in ({"b"}, {"a", "b"})
    assert text(outputs[3]) in ("one", "two", "seven")
    assert told[5].finishes == [FinishReason.LENGTH]
    assert set(text(outputs[5])) <= set("abc")
    assert set(json.loads(text(outputs[6]))) == set(RECORD["required"])
    return outputs


def test_steps_ahead_chunks_and_preemptions_change_no_token(caplog: pytest.LogCaptureFixture) -> None:
    """Also of the requests beside them that are free."""
    caplog.set_level(logging.ERROR)
    outputs = []
    variants: list[dict[str, Any]] = [{"ahead": False}, {"ahead": True}]
    variants += [{"ahead": True, "budget": 16}, {"ahead": True, "num_blocks": 8}]
    for options in variants:
        with running_core(**options) as core:
            # The second time all start together: their grammars are known.
            outputs += [generate(core, 0), generate(core, 100)]
            assert bool(core.core.scheduler.counters.num_preemptions) == ("num_blocks" in options)
    assert outputs[1:] == outputs[:1] * 7
    assert not caplog.records


def test_one_that_goes_while_it_waits_leaves_nothing(core: CoreRequests) -> None:
    wanted = spec("regex", "x{5}y*")
    sampling = SamplingParams(max_tokens=8, structured=wanted)
    leaving, staying = (core.add(number, [5, 6, 7], sampling) for number in (1, 2))
    assert core.core._load().num_waiting == 2
    core.core.handle(AbortRequests([leaving]))
    (told,) = core.run_until_finished([staying])
    assert text(told.tokens[:5]).startswith("x")
    assert not core.told[leaving].finishes
    core.step()  # one was under way when the other ended
    assert not core.core.has_work
    assert core.core._load().num_waiting == 0


def test_a_grammar_that_makes_no_sense_ends_its_request_alone(core: CoreRequests) -> None:
    free = core.add(1, [5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True))
    wrong = core.add(2, [5, 6, 7], SamplingParams(max_tokens=30, structured=spec("regex", "[a")))
    told = core.run_until_finished([free, wrong])
    assert [each.finishes for each in told] == [[FinishReason.LENGTH], [FinishReason.ERROR]]
    assert (len(told[0].tokens), told[1].tokens) == (30, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_nothing_can_follow_ends_its_request_alone(
    core: CoreRequests, caplog: pytest.LogCaptureFixture, temperature: float
) -> None:
    """The one token that the client allows is none that the grammar does."""
    (start,) = read_tokens("secret")[:1]
    free = core.add(1, [5, 6, 7], SamplingParams(max_tokens=20, ignore_eos=True))
    none = SamplingParams(
        max_tokens=20, temperature=temperature, allowed_token_ids=(start,), structured=spec("choice", ["zebra"])
    )
    stuck = core.add(2, [5, 6, 7], none)
    told = core.run_until_finished([free, stuck])
    assert [each.finishes for each in told] == [[FinishReason.LENGTH], [FinishReason.ERROR]]
    assert len(told[0].tokens) == 20
    assert "zebra" not in caplog.text


class _Watched:
    """An executor of which all is kept: calls in order, each with the number of its step; and masks with the plan whose
    they are, whether they came with it or followed."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plans: list[StepPlan] = []
        self.calls: list[tuple[str, int]] = []
        self.masked: list[tuple[StepPlan, TokenMasks]] = []
        self.failing: set[int] = set()
        """Steps that come to nothing."""

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        self.calls.append(("submit", plan.step))
        self._keep(plan.masks)
        return _WatchedHandle(self, plan.step, self._executor.submit(plan))

    def mask(self, masks: TokenMasks | None) -> None:
        assert self.plans[-1].masks_follow
        self.calls.append(("mask", self.plans[-1].step))
        self._keep(masks)
        self._executor.mask(masks)

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _keep(self, masks: TokenMasks | None) -> None:
        if masks is not None:
            self.masked.append((self.plans[-1], masks))


class _WatchedHandle:
    def __init__(self, watched: _Watched, step: int, handle: StepHandle) -> None:
        self._watched, self._step, self._handle = watched, step, handle

    def result(self) -> StepResult:
        result = self._handle.result()
        self._watched.calls.append(("result", self._step))
        if self._step in self._watched.failing:
            raise EngineError("it comes to nothing")
        return result


@contextmanager
def watched_core(**options: Any) -> Iterator[tuple[CoreRequests, _Watched]]:
    with running_core(**options) as core:
        watched = core.core._executor = _Watched(core.core._executor)
        yield core, watched


@pytest.mark.parametrize("ahead", [True, False])
def test_masks_are_of_rows_that_sample(ahead: bool) -> None:
    """Of the last chunk of a prompt, and of every step after it but the one behind the last token."""
    with watched_core(ahead=ahead, budget=16) as (core, watched):
        wanted = spec("regex", "[a-c]{40}")
        bound = core.add(1, [5] * 100, SamplingParams(max_tokens=3, structured=wanted))
        free = core.add(2, [6] * 8, SamplingParams(max_tokens=3, ignore_eos=True))
        core.run_until_finished([bound, free])
    assert len(watched.masked) == len(core.told[bound].tokens)
    assert len(watched.plans) > len(watched.masked)
    for plan, masks in watched.masked:
        assert plan.samples[masks.rows].all()
        assert np.any(masks.bits, axis=1).all()


def test_a_step_begins_before_the_tokens_are_known_that_its_masks_depend_on() -> None:
    """It is handed over while the step before runs. Its masks follow once that is over, before the next step."""
    with watched_core(ahead=True) as (core, watched):
        sampling = SamplingParams(max_tokens=5, temperature=1.0, seed=1, structured=spec("regex", "[a-c]{40}"))
        core.run_until_finished([core.add(1, [5, 6, 7], sampling)])
    expected = [("submit", 1)]
    for step in range(1, 5):
        expected += [("submit", step + 1), ("result", step), ("mask", step + 1)]
    assert watched.calls == [*expected, ("result", 5)]
    assert [plan.masks_follow for plan in watched.plans] == [False, True, True, True, True]


def test_without_running_ahead_masks_come_with_their_plans() -> None:
    with watched_core(ahead=False) as (core, watched):
        sampling = SamplingParams(max_tokens=5, structured=spec("regex", "[a-c]{40}"))
        core.run_until_finished([core.add(1, [5, 6, 7], sampling)])
    assert watched.calls == [(call, step) for step in range(1, 6) for call in ("submit", "result")]
    assert not any(plan.masks_follow for plan in watched.plans)


def test_free_requests_alone_have_nothing_to_wait_for() -> None:
    """Also after others that had grammars."""
    with watched_core(ahead=True) as (core, watched):
        core.run_until_finished([core.add(1, [5, 6], SamplingParams(max_tokens=2, structured=spec("regex", "a{9}")))])
        core.run()
        watched.calls.clear()
        core.run_until_finished([core.add(2, [5, 6], SamplingParams(max_tokens=9, ignore_eos=True))])
    assert {call for call, _ in watched.calls} == {"submit", "result"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_who_ends_while_a_step_waits_for_masks_has_none(temperature: float) -> None:
    """By its end token, by an abort, and by a token that its grammar refuses, beside one that goes on as it does alone.
    Others may have their slots right after."""
    lasting = SamplingParams(max_tokens=30, temperature=temperature, seed=3, structured=spec("regex", "[a-f]{60}"))
    brief = SamplingParams(max_tokens=30, temperature=temperature, seed=4, structured=spec("choice", ["ab", "c"]))
    with running_core(ahead=False) as core:
        alone = core.run_until_finished(
            [core.add(number, [5, 6, 7], each) for number, each in ((1, lasting), (2, brief))]
        )
    with running_core(ahead=True) as core:
        others = [core.add(number, [8, 9], lasting) for number in range(10, 13)]
        first = [core.add(1, [5, 6, 7], lasting), core.add(2, [5, 6, 7], brief)]
        while len(core.told[first[0]].tokens) < 6:
            if not core.core.has_work:
                core._woken.get(timeout=60)
            core.step()
            if len(core.told[others[0]].tokens) == 3:
                core.core.handle(AbortRequests(others))
        again = core.add(3, [5, 6, 7], brief)
        told = core.run_until_finished([*first, again])
    assert [each.tokens for each in told] == [each.tokens for each in (*alone, alone[1])]
    assert all(not core.told[each].finishes for each in others)


def test_a_token_that_a_grammar_refuses_ends_its_request_alone() -> None:
    """While the step behind that token waits for its masks."""

    class Refusing:
        def __init__(self, matcher: Matcher) -> None:
            self._matcher, self._left = matcher, 2

        def fill(self, bits: NDArray[np.int32], row: int) -> None:
            self._matcher.fill(bits, row)

        def forced(self) -> list[int]:
            return self._matcher.forced()

        def accept(self, token_id: int) -> None:
            self._left -= 1
            if not self._left:
                raise GrammarError("this is too much")
            self._matcher.accept(token_id)

    lasting = SamplingParams(max_tokens=12, temperature=1.0, seed=3, structured=spec("regex", "[a-f]{60}"))
    with running_core(ahead=True) as core:
        ids = [core.add(number, [5, 6, 7], lasting) for number in (1, 2)]
        while not core.core.has_work:
            core._woken.get(timeout=60)
            core.step()
        # Both have their first token.
        output = core.core._structured._outputs[ids[0]]
        output.matcher = Refusing(output.matcher)
        told = core.run_until_finished(ids)
    assert [each.finishes for each in told] == [[FinishReason.ERROR], [FinishReason.LENGTH]]
    assert (len(told[0].tokens), len(told[1].tokens)) == (3, 12)
    assert told[1].tokens[:3] == told[0].tokens


def test_after_a_step_that_fails_who_is_in_the_next_one_alone_goes_on() -> None:
    sampling = SamplingParams(max_tokens=6, temperature=1.0, seed=3, structured=spec("regex", "[a-f]{60}"))
    with watched_core(ahead=True) as (core, watched):
        alone = core.run_until_finished([core.add(1, [5, 6, 7], sampling)])
        core.run()
        watched.failing.add(watched.plans[-1].step + 2)
        ids = [core.add(2, [5, 6, 7], sampling)]
        core.step()
        ids.append(core.add(3, [5, 6, 7], sampling))
        told = core.run_until_finished(ids)
    assert [each.finishes for each in told] == [[FinishReason.ERROR], [FinishReason.LENGTH]]
    assert told[1].tokens == alone[0].tokens
