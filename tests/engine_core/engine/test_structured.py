"""Requests with grammars in an engine core over a real worker: nothing of how they are scheduled shows."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_SLOTS, tiny_engine_config
from tests.support.core_requests import CoreRequests
from tests.support.generations import prompts
from tests.support.grammars import spec
from tokenmill_engine.config.engine import CacheConfig, SchedulerConfig
from tokenmill_engine.engine import Executor
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.messages import AbortRequests, FinishReason, SamplingParams, StructuredSpec
from tokenmill_engine.outputs import StepHandle, StepPlan
from tokenmill_engine.vocabulary.vocabulary import read_vocabulary

pytestmark = pytest.mark.slow

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 5]}}, "required": ["b"]}
WANTED: list[StructuredSpec | None] = [
    None,
    spec("regex", "[a-f]{3,9}-[0-9]{2}"),
    spec("json", SCHEMA, any_whitespace=False),
    spec("choice", ["one", "two", "seven"]),
    None,
    spec("regex", "(ab|c){40,}"),
]
TEMPERATURES = (0.0, 0.9, 1.3, 2.0, 1.0, 0.7)


@contextmanager
def running_core(*, ahead: bool, budget: int = 512, num_blocks: int = 64) -> Iterator[CoreRequests]:
    config = tiny_engine_config(
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks),
        scheduler=SchedulerConfig(NUM_SLOTS, budget, explicit_budget=True, async_scheduling=ahead),
    )
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
            zip(prompts()[:6], WANTED, TEMPERATURES, strict=True), start=1
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
    """An executor whose plans are kept."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> StepHandle:
        self.plans.append(plan)
        return self._executor.submit(plan)

    def shutdown(self) -> None:
        self._executor.shutdown()


def test_masks_are_of_rows_that_sample() -> None:
    """In the plans that the executor gets: of the last chunk of a prompt, and of every step after it."""
    with running_core(ahead=True, budget=16) as core:
        watched = core.core._executor = _Watched(core.core._executor)
        wanted = spec("choice", ["aaaaaaaaaaaa"])
        bound = core.add(1, [5] * 100, SamplingParams(max_tokens=3, structured=wanted))
        free = core.add(2, [6] * 8, SamplingParams(max_tokens=3, ignore_eos=True))
        core.run_until_finished([bound, free])
    masked = [(plan, plan.masks) for plan in watched.plans if plan.masks is not None]
    assert len(masked) == len(core.told[bound].tokens)
    assert len(watched.plans) > len(masked)
    for plan, masks in masked:
        assert plan.samples[masks.rows].all()
        assert np.any(masks.bits, axis=1).all()
