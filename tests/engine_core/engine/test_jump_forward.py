"""Text that has to follow is computed at once, and nothing else changes."""

import json
from typing import Any

import pytest

from tests.engine_core.engine.test_structured import generate, read_tokens, running_core, text, watched_core
from tests.support.grammars import spec
from tokenmill_engine.messages import AbortRequests, FinishReason, SamplingParams, StructuredSpec

pytestmark = pytest.mark.slow


def test_text_that_has_to_follow_takes_fewer_steps_and_is_what_it_would_be() -> None:
    """What comes behind it too. Here a text can hardly be written by other tokens."""
    outputs, num_rows = [], []
    for jumps in (True, False):
        with watched_core(ahead=True, jumps=jumps) as (core, watched):
            outputs.append(generate(core, 0))
            num_rows.append(sum(plan.num_reqs for plan in watched.plans))
            known = [token for plan in watched.plans for append in plan.known for token in append.token_ids]
            assert core.core.scheduler.counters.num_known_tokens == len(known)
            assert bool(known) == jumps
    assert outputs[0] == outputs[1]
    assert num_rows[0] < num_rows[1] - 40


@pytest.mark.parametrize("ahead", [True, False])
def test_an_output_ends_in_the_middle_of_what_has_to_follow(ahead: bool) -> None:
    """By its length, and at a token that the request names; the slot is another request's at once."""
    whole = read_tokens("abcdefghijklmnopqrstuvwxyz")
    wanted = spec("regex", "abcdefghijklmnopqrstuvwxyz")
    with running_core(ahead=ahead) as core:
        for first in (1, 101):
            short = core.add(first, [5, 6, 7], SamplingParams(max_tokens=4, structured=wanted))
            stopped = core.add(
                first + 1,
                [5, 6, 7],
                SamplingParams(max_tokens=60, structured=wanted, stop_token_ids=(whole[5],)),
            )
            late = core.add(
                first + 2,
                [5, 6, 7],
                SamplingParams(max_tokens=60, min_tokens=8, structured=wanted, stop_token_ids=(whole[5],)),
            )
            told = core.run_until_finished([short, stopped, late])
            # A token that has to come ends the output also before `min_tokens`.
            assert [each.tokens for each in told] == [whole[:4], whole[:6], whole[:6]]
            assert [each.finishes for each in told] == [[FinishReason.LENGTH], [FinishReason.STOP], [FinishReason.STOP]]


LOOKING: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logit_bias": {5: 1.0}},
    {"bad_words_token_ids": ((5,),)},
    {"allowed_token_ids": tuple(range(400))},
]


@pytest.mark.parametrize("asked", LOOKING, ids=lambda asked: next(iter(asked)))
def test_who_asks_about_tokens_gets_them_one_by_one(asked: dict[str, Any]) -> None:
    with watched_core(ahead=True) as (core, watched):
        wanted = spec("choice", ["abcdefghijklmnopqrstuvwxyz"])
        (told,) = core.run_until_finished(
            [core.add(1, [5, 6, 7], SamplingParams(max_tokens=12, structured=wanted, **asked))]
        )
    assert not any(plan.known for plan in watched.plans)
    assert len(told.tokens) == 12
    if "logprobs" in asked:
        assert len(told.logprobs) == 12


def test_who_leaves_before_what_has_to_follow_is_written_leaves_nothing() -> None:
    """Neither to the next request in the slot nor in a step that fails."""
    forced = SamplingParams(max_tokens=40, structured=spec("regex", "(abcdefghijklmnopqrstuvwxyz[0-9])+"))
    free = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    with watched_core(ahead=True) as (core, watched):
        alone = core.run_until_finished([core.add(number, [5, 6, number], free) for number in range(1, 9)])
        core.run()
        for index in range(1, 9):
            leaving = [core.add(10 * index + 100 + number, [5, 6, 7], forced) for number in range(8)]
            while not core.core.scheduler.num_unfinished:
                core._woken.get(timeout=60)
                core.step()
            for _ in range(index % 4):
                core.step()
            if index % 2:
                core.core.handle(AbortRequests(leaving))
            else:
                watched.failing.add(watched.plans[-1].step)
            told = core.run_until_finished(
                [core.add(1000 * index + number, [5, 6, number], free) for number in range(1, 9)]
            )
            assert [each.tokens for each in told] == [each.tokens for each in alone]
            core.run()


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize(
    "wanted",
    [
        spec("choice", ["<|im_end|>"]),
        spec("json", {"const": "caf\u00e9 cafe\u0301 <|im_start|> \u212b \U0001f642"}, any_whitespace=False),
        spec("grammar", 'root ::= "na" ("\u00e9" | "\u00e8") " end"'),
        spec("grammar", 'root ::= "ab" root'),
    ],
    ids=lambda wanted: wanted.text[:20],
)
def test_odd_texts(wanted: StructuredSpec, jumps: bool) -> None:
    """Names of special tokens, characters that tokenizers compose, alternatives that differ within a character, and
    what never ends."""
    with running_core(ahead=True, jumps=jumps) as core:
        sampling = SamplingParams(max_tokens=80, temperature=0.0, structured=wanted)
        told, beside = core.run_until_finished([core.add(1, [5, 6], sampling), core.add(2, [5, 6, 7], sampling)])
    assert told.tokens == beside.tokens
    if told.finishes == [FinishReason.STOP]:
        written = text(told.tokens)
        assert wanted.kind != "choice" or written in json.loads(wanted.text)
        assert wanted.kind != "json" or json.loads(written) == json.loads(wanted.text)["const"]
        assert wanted.kind != "grammar" or written in ("na\u00e9 end", "na\u00e8 end")
    else:
        assert told.finishes == [FinishReason.LENGTH]
        assert wanted.text.endswith("root")
