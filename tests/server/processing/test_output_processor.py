import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.messages import Finish, FinishReason, SamplingParams, TokenLogprobs
from tokenmill_server.processing.generation import GenerationRequest, TokenLogprob
from tokenmill_server.processing.logprobs import LOGPROB_FLOOR, unpack_logprobs
from tokenmill_server.processing.output_processor import Choice, Generation
from tokenmill_server.processing.tokenizer import Tokenizer


@dataclass
class Recorder:
    """An `OutputListener` that remembers everything."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def on_delta(
        self, choice: Choice, text: str, token_ids: Sequence[int], logprobs: list[TokenLogprob] | None
    ) -> None:
        self.texts.append(text)
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs or ())

    def on_error(self, error: TokenmillError) -> None:
        raise AssertionError(error)


def start(tokenizer: Tokenizer, prompt: Sequence[int] = (504,), **sampling: Any) -> tuple[Choice, Recorder]:
    recorder = Recorder()
    request = GenerationRequest("label", prompt, SamplingParams(**sampling), 0.0)
    return Generation(request, recorder, tokenizer, 0).choices[0], recorder


def logprobs_of(tokens: Sequence[int]) -> TokenLogprobs:
    values = [value for token in tokens for value in (-float(token), -0.5)]
    return TokenLogprobs(
        0,
        1,
        struct.pack(f"<{2 * len(tokens)}i", *[token_id for token in tokens for token_id in (token, token + 1)]),
        struct.pack(f"<{len(values)}f", *values),
        struct.pack(f"<{len(tokens)}i", *[2] * len(tokens)),
    )


@given(
    text=st.text(alphabet="abc é🎉.", max_size=30),
    stops=st.lists(st.text(alphabet="abc é🎉.", min_size=1, max_size=4), max_size=4),
    sizes=st.lists(st.integers(1, 4)),
    min_tokens=st.integers(0, 5),
    include=st.booleans(),
    with_logprobs=st.booleans(),
)
def test_steps_of_any_size_give_the_same(
    tokenizer: Tokenizer,
    text: str,
    stops: list[str],
    sizes: list[int],
    min_tokens: int,
    include: bool,
    with_logprobs: bool,
) -> None:
    """Text, tokens, log-probabilities and the reason do not depend on how many tokens a step yields."""
    ids = tokenizer.encode(text)
    results = []
    for groups in (sizes, [1] * len(ids), [len(ids)]):
        choice, recorder = start(
            tokenizer, stop=tuple(stops), min_tokens=min_tokens, include_stop_str_in_output=include, max_tokens=99
        )
        position = 0
        for size in [*groups, *[1] * len(ids)]:
            step = ids[position : position + size]
            position += size
            if not step or choice.finish_reason is not None:
                break
            last = position >= len(ids)
            stopped = choice.push(
                step, Finish(0, FinishReason.LENGTH) if last else None, logprobs_of(step) if with_logprobs else None
            )
            assert stopped == (choice.finish_reason is not None and not last)
        joined = [(entry.token_id, entry.text) for entry in recorder.logprobs]
        results.append(("".join(recorder.texts), recorder.token_ids, joined, choice.finish_reason, choice.stop_reason))
        assert choice.num_tokens == len(recorder.token_ids)
    assert results[0] == results[1] == results[2]


def test_the_token_that_means_stop_is_no_text(tokenizer: Tokenizer) -> None:
    the, end = 504, 2
    choice, recorder = start(tokenizer, skip_special_tokens=False)
    choice.push([the, end], Finish(0, FinishReason.STOP), None)
    assert ("".join(recorder.texts), recorder.token_ids) == ("The", [the, end])
    assert (choice.finish_reason, choice.stop_reason, choice.num_tokens) == (FinishReason.STOP, None, 2)

    choice, recorder = start(tokenizer, stop_token_ids=(the,), include_stop_str_in_output=True)
    choice.push([the], Finish(0, FinishReason.STOP, stop_token_id=the), None)
    assert ("".join(recorder.texts), choice.stop_reason) == ("The", the)


def test_a_stop_string_ends_the_choice_before_the_engine_does(tokenizer: Tokenizer) -> None:
    choice, recorder = start(tokenizer, stop=(" three",), max_tokens=99)
    ids = tokenizer.encode("one two three four")
    assert [choice.push([token_id], None, None) for token_id in ids[:3]] == [False, False, True]
    assert ("".join(recorder.texts), choice.stop_reason, choice.num_tokens) == ("one two", " three", 3)
    assert choice.generation.num_open == 0


def test_what_was_held_back_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    choice, recorder = start(tokenizer, stop=(" three four",))
    ids = tokenizer.encode("one two three")
    for token_id in ids[:-1]:
        choice.push([token_id], None, None)
    choice.push(ids[-1:], Finish(0, FinishReason.LENGTH), None)
    assert ("".join(recorder.texts), choice.finish_reason) == ("one two three", FinishReason.LENGTH)


def test_minus_infinity_has_a_floor() -> None:
    message = TokenLogprobs(
        0, 1, struct.pack("<2i", 5, 6), struct.pack("<2f", float("-inf"), float("nan")), struct.pack("<i", 9)
    )
    (entry,) = unpack_logprobs(message)
    assert (entry.logprob, entry.top, entry.rank) == (LOGPROB_FLOOR, [(6, LOGPROB_FLOOR)], 9)


def test_prompt_logprobs_arrive_in_pieces_and_from_every_choice(tokenizer: Tokenizer) -> None:
    prompt = [504, 505, 506, 507]
    request = GenerationRequest("label", prompt, SamplingParams(n=2, prompt_logprobs=1), 0.0)
    generation = Generation(request, Recorder(), tokenizer, 0)
    for choice in generation.choices:
        generation.add_prompt_logprobs(choice, logprobs_of(prompt[1:3]))
        generation.add_prompt_logprobs(choice, logprobs_of(prompt[3:]))
    entries = generation.prompt_logprobs()
    assert entries is not None
    assert [entry and entry.token_id for entry in entries] == [None, 505, 506, 507]


def test_every_choice_has_its_own_state(tokenizer: Tokenizer) -> None:
    request = GenerationRequest("label", [504], SamplingParams(n=3), 0.0)
    generation = Generation(request, Recorder(), tokenizer, 0)
    generation.choices[1].push([504, 505], Finish(1, FinishReason.LENGTH), None)
    assert (generation.num_open, generation.num_tokens) == (2, 2)
    assert [choice.finish_reason for choice in generation.choices] == [None, FinishReason.LENGTH, None]
