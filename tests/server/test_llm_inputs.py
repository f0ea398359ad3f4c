"""What people pass to `LLM`: taken as they mean it, or refused with a sentence."""

from typing import Any

import pytest
from PIL import Image

from tokenmill import SamplingParams
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.llm_inputs import (
    Conversation,
    Item,
    conversations_of,
    items_of,
    priorities_of,
    sampling_of,
    template_variables_of,
)
from tokenmill_server.multimodal.parts import ImageSource, MediaParts


def parts() -> MediaParts:
    """Of a model of text alone."""
    return MediaParts("tiny")


@pytest.mark.parametrize(
    ("prompts", "items"),
    [
        ("a", [Item(text="a")]),
        ([1, 2], [Item(token_ids=[1, 2])]),
        (["a", (1, 2)], [Item(text="a"), Item(token_ids=[1, 2])]),
        ({"prompt": "a", "cache_salt": "s"}, [Item(text="a", cache_salt="s")]),
        ([{"prompt_token_ids": range(2)}], [Item(token_ids=[0, 1])]),
        ([], []),
    ],
)
def test_prompts(prompts: Any, items: list[Item]) -> None:
    assert items_of(prompts, parts) == items


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (123, "a prompt is text, a list of token ids, .*; got int"),
        (None, "got NoneType"),
        (b"bytes", "got bytes"),
        (["a", 3.5], "prompt 1 must be text, a list of token ids, .*; got float"),
        ({"prompt": 5}, "`prompt` of the prompt must be text; got int"),
        ([{"prompt_token_ids": 5}], "`prompt_token_ids` of prompt 0 must be a list of integers; got int"),
        ([{"prompt": "a", "cache_salt": 5}], "cache_salt of prompt 0 must be text; got int"),
        ({"prompt": "a", "mm_processor_kwargs": 5}, "mm_processor_kwargs of the prompt must be a dict; got int"),
    ],
)
def test_what_is_no_prompt(prompts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        items_of(prompts, parts)


def test_what_a_prompt_mapping_has() -> None:
    for prompt, wrong in (
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt 0 has both of these, or neither"),
        ({"cache_salt": "s"}, "prompt 0 has both of these, or neither"),
        ({"prompt": "a", "multi_model_data": {}}, "prompt 0 has 'multi_model_data', which is not known"),
    ):
        with pytest.raises(InvalidRequestError, match=rf"perhaps `cache_salt`, `multi_modal_data`, .*; {wrong}$"):
            items_of([prompt], parts)


def test_media_beside_a_prompt() -> None:
    image = Image.new("RGB", (2, 3))
    sources = (ImageSource(image, "auto", "multi_modal_data['image'][0]"),)
    said = {"max_pixels": 4}
    beside: Any = {"multi_modal_data": {"image": image}, "mm_processor_kwargs": said}

    def of_images() -> MediaParts:
        return MediaParts("tiny", images=True, local=True)

    assert items_of([{"prompt": "a", **beside}, {"prompt_token_ids": [1], **beside}], of_images) == [
        Item(text="a", sources=sources, processor_kwargs=said),
        Item(token_ids=[1], sources=sources, processor_kwargs=said),
    ]
    empty: Any = {"prompt": "a", "multi_modal_data": None, "multi_modal_uuids": None, "mm_processor_kwargs": None}
    assert items_of(empty, parts) == [Item(text="a")]
    with pytest.raises(
        InvalidRequestError, match="images in multi_modal_data of prompt 0 are not supported: the model"
    ):
        items_of([{"prompt": "a", **beside}], parts)


def test_sampling_parameters_are_written_as_people_do() -> None:
    written: Any = {"stop": "x", "stop_token_ids": [3], "temperature": 0, "logit_bias": {5: 1}}
    first, second = sampling_of(SamplingParams(**written), 2)
    assert first is second
    assert (first.stop, first.stop_token_ids, first.temperature, first.logit_bias) == (("x",), (3,), 0.0, {5: 1.0})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": 0}, "must be SamplingParams(...), or a list of them with one per prompt; got dict"),
        ([SamplingParams(), {}], "one per prompt; got dict"),
        (7, "one per prompt; got int"),
    ],
)
def test_what_are_no_sampling_parameters(given: Any, message: str) -> None:
    with pytest.raises(TypeError) as raised:
        sampling_of(given, 2)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "SamplingParams(...): temperature is of a wrong type: Expected float, got str"),
        ({"stop": 5}, "stop is of a wrong type: Expected list, got int"),
        ({"stop": ["a", 5]}, "stop[1] is of a wrong type: Expected str, got int"),
        ({"logit_bias": [1]}, "logit_bias is of a wrong type: Expected dict | None, got list"),
        ({"logit_bias": {"5": 1}}, "logit_bias is of a wrong type: Expected int, got str"),
        ({"ignore_eos": "yes"}, "ignore_eos is of a wrong type: Expected bool, got str"),
        ({"max_tokens": 2.5}, "max_tokens is of a wrong type: Expected int | None, got float"),
    ],
)
def test_fields_of_wrong_types(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError) as raised:
        sampling_of(SamplingParams(**fields), 1)
    assert message in str(raised.value)


def test_as_many_as_prompts() -> None:
    assert priorities_of(None, 2) == [0, 0]
    assert priorities_of((1, 2), 2) == [1, 2]
    with pytest.raises(InvalidRequestError, match="2 prompts need as many priorities, got 1"):
        priorities_of([1], 2)
    with pytest.raises(TypeError, match="priority must be a list of integers, one per prompt; got int"):
        priorities_of(5, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="2 prompts need one or as many sampling_params, got 1"):
        sampling_of([SamplingParams()], 2)


@pytest.mark.parametrize("messages", ["hi", 5, ["hi"]])
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a list .*; got (str|int)"):
        conversations_of(messages, parts)


def test_conversations() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    flat = [{"role": "user", "content": "Hi"}]
    assert conversations_of([message], parts) == [Conversation(flat, [])]  # type: ignore[list-item]
    assert conversations_of([[message], [message]], parts) == [Conversation(flat, [])] * 2  # type: ignore[list-item]


def test_what_is_wrong_names_the_conversation_and_the_part() -> None:
    good = [{"role": "user", "content": "Hi"}]
    bad = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image_pil"}]}]
    wanted = r"prompt 1: .* takes text only here \(at messages\[0\]\.content\[1\]\.type\)$"
    with pytest.raises(InvalidRequestError, match=wanted):
        conversations_of([good, bad], parts)  # type: ignore[list-item]


def test_keys_of_parts_without_effect_are_told(caplog: pytest.LogCaptureFixture) -> None:
    part = {"type": "text", "text": "Hi", "txet": "Hi"}
    conversations_of([{"role": "user", "content": [part]}], parts)  # type: ignore[list-item]
    assert "keys of content parts without effect: messages[0].content[0].txet" in caplog.text


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    assert template_variables_of({"a": 1}, [tool], {"tools"}) == {"a": 1, "tools": [tool]}
    assert template_variables_of(None, None, set()) == {}
    with pytest.raises(InvalidRequestError, match="template has no tools"):
        template_variables_of(None, [tool], {"messages"})
    with pytest.raises(InvalidRequestError, match="the name of a function"):
        template_variables_of(None, [{"function": {}}], {"tools"})
    with pytest.raises(TypeError, match="tools must be a list of dicts; got dict"):
        template_variables_of(None, tool, {"tools"})  # type: ignore[arg-type]


def test_calls_in_conversations() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": [call]}]
    (conversation,) = conversations_of(messages, parts)
    assert conversation.messages[1] == {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(InvalidRequestError, match=r"prompt 0: a call has the name .*\(at messages\[1\]\.tool_calls"):
        conversations_of([messages[0], {"role": "assistant", "tool_calls": [{"function": {}}]}], parts)
