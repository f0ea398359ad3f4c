import dataclasses
import threading
from typing import Any

import pytest

from tests.support.api_server import engine_config
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.errors import ContextLengthError, InvalidRequestError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.processing.chat_template import ChatTemplate
from tokenmill_server.processing.input_processor import ChatOptions, InputProcessor, Prompt, Truncation
from tokenmill_server.processing.tokenizer import Tokenizer

pytestmark = pytest.mark.asyncio


def processor(tokenizer: Tokenizer, max_model_len: int = 100, **model: Any) -> InputProcessor:
    template = ChatTemplate("{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}")
    return InputProcessor(tokenizer, template, engine_config(max_model_len=max_model_len, **model))


async def test_a_prompt_and_its_limits(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer)
    prompt = await inputs.encode_text("The capital of France is")
    request = inputs.build(prompt, SamplingParams(max_tokens=None), label="x", priority=0, cache_salt="s")
    assert list(request.prompt_token_ids) == tokenizer.encode("The capital of France is")
    assert request.sampling.max_tokens == 100 - len(request.prompt_token_ids)
    assert (request.label, request.prompt, request.cache_salt) == ("x", "The capital of France is", "s")
    assert inputs.build(prompt, SamplingParams(max_tokens=99)).sampling.max_tokens == 95


@pytest.mark.parametrize(("length", "fits"), [(99, True), (100, False), (300, False)])
async def test_context_length(tokenizer: Tokenizer, length: int, fits: bool) -> None:
    inputs = processor(tokenizer)
    prompt = Prompt([504] * length)
    if fits:
        assert inputs.take_token_ids([504] * length) == prompt
        assert inputs.build(prompt, SamplingParams()).sampling.max_tokens == 1
        return
    for refused in (lambda: inputs.build(prompt, SamplingParams()), lambda: inputs.take_token_ids([-1] * length)):
        with pytest.raises(ContextLengthError, match=f"100 tokens.*{length}") as caught:
            refused()
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"


async def test_absurdly_long_text_is_not_even_tokenized(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextLengthError, match="characters"):
        await processor(tokenizer).encode_text("a" * 10_000_000)


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (SamplingParams(max_tokens=101), "max_tokens"),
        (SamplingParams(max_tokens=99, min_tokens=99), "min_tokens"),
        (SamplingParams(temperature=9.0), "temperature"),
    ],
)
async def test_what_does_not_fit_is_refused(tokenizer: Tokenizer, sampling: SamplingParams, param: str) -> None:
    inputs = processor(tokenizer)
    with pytest.raises(InvalidRequestError) as caught:
        inputs.build(inputs.take_token_ids([504, 504]), sampling)
    assert caught.value.param == param


async def test_empty_prompts_are_refused(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer)
    with pytest.raises(InvalidRequestError, match="empty"):
        inputs.build(await inputs.encode_text(""), SamplingParams())


@pytest.mark.parametrize("token_id", [-1, 49152, 10**12])
async def test_ids_outside_the_vocabulary(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidRequestError, match="49151"):
        processor(tokenizer).take_token_ids([504, token_id])


async def test_chat(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer)
    messages = [{"role": "user", "content": "Hi "}]
    assert (await inputs.encode_chat(messages, ChatOptions())).text == "Hi >"
    continued = ChatOptions(add_generation_prompt=False, continue_final_message=True)
    assert (await inputs.encode_chat(messages, continued)).text == "Hi "
    with pytest.raises(InvalidRequestError, match="exclude each other"):
        await inputs.encode_chat(messages, ChatOptions(continue_final_message=True))


async def test_chat_without_a_template(tokenizer: Tokenizer) -> None:
    inputs = InputProcessor(tokenizer, None, engine_config())
    with pytest.raises(InvalidRequestError, match="--chat-template"):
        await inputs.encode_chat([{"role": "user", "content": "Hi"}], ChatOptions())


async def test_priority_needs_its_policy(tokenizer: Tokenizer) -> None:
    prompt = Prompt([504])
    with pytest.raises(InvalidRequestError, match="--scheduling-policy"):
        processor(tokenizer).build(prompt, SamplingParams(), priority=1)
    config = dataclasses.replace(engine_config(), scheduler=SchedulerConfig(policy="priority"))
    assert InputProcessor(tokenizer, None, config).build(prompt, SamplingParams(), priority=-3).priority == -3


async def test_bad_words_are_banned_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    request = processor(tokenizer).build(Prompt([504]), SamplingParams(bad_words=("Paris",)))
    assert set(request.sampling.bad_words_token_ids) == {
        tuple(tokenizer.encode("Paris")),
        tuple(tokenizer.encode(" Paris")),
    }


async def test_bad_words_are_tokenized_once_and_only_if_they_are_short(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = processor(tokenizer)
    encoded: list[str] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: encoded.append(text) or encode(text, **options))
    with pytest.raises(InvalidRequestError, match="bad_words"):
        inputs.build(Prompt([504]), SamplingParams(bad_words=("x" * 200_000,)))
    assert encoded == []
    sampling = SamplingParams(bad_words=("Paris",))
    requests = [inputs.build(Prompt([504] * length), sampling) for length in range(1, 20)]
    assert encoded == ["Paris", " Paris"]
    assert len({request.sampling.bad_words_token_ids for request in requests}) == 1


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 10**30, 1.5])
async def test_priorities_are_64_bit_integers(tokenizer: Tokenizer, priority: Any) -> None:
    config = dataclasses.replace(engine_config(), scheduler=SchedulerConfig(policy="priority"))
    with pytest.raises(InvalidRequestError) as caught:
        InputProcessor(tokenizer, None, config).build(Prompt([504]), SamplingParams(), priority=priority)
    assert caught.value.param == "priority"


async def test_long_conversations_are_rendered_in_a_thread(tokenizer: Tokenizer) -> None:
    threads: list[str] = []
    inputs = processor(tokenizer)
    assert inputs.template is not None
    render = inputs.template.render

    def noting(*arguments: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(*arguments)

    inputs.template.render = noting  # type: ignore[method-assign]
    for messages in ([("user", "x" * 1000)], [("user", "x" * 70_000)], [("user", "")] * 2000):
        await inputs.chat_text([{"role": role, "content": text} for role, text in messages], ChatOptions())
    assert [name == threading.main_thread().name for name in threads] == [True, False, False]


async def test_resolved_values(tokenizer: Tokenizer) -> None:
    inputs = processor(tokenizer, max_logprobs=-1)
    sampling = inputs.build(Prompt([504]), SamplingParams(temperature=1e-6, logprobs=-1, prompt_logprobs=-1)).sampling
    assert (sampling.temperature, sampling.logprobs, sampling.prompt_logprobs) == (0.0, 49152, 49152)


@pytest.mark.parametrize(
    ("truncation", "kept"),
    [
        (Truncation(2), [3, 4]),
        (Truncation(2, "right"), [0, 1]),
        (Truncation(9), [0, 1, 2, 3, 4]),
        (Truncation(-1), [0, 1, 2, 3, 4]),
        (Truncation(0), []),
    ],
)
async def test_truncation(tokenizer: Tokenizer, truncation: Truncation, kept: list[int]) -> None:
    assert list(processor(tokenizer).take_token_ids([0, 1, 2, 3, 4], truncation).token_ids) == kept


@pytest.mark.parametrize("limit", [-2, 101])
async def test_truncation_out_of_range(tokenizer: Tokenizer, limit: int) -> None:
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
        processor(tokenizer).take_token_ids([0], Truncation(limit))
