"""Where images stand in prompts."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.model_files import read_tokenizer_facts, resolve_model
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.parts import IMAGE_PART
from tokenmill_server.multimodal.prompts import Placeholders, TypedTokens
from tokenmill_server.processing.chat_template import ChatTemplate
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer

STRINGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LISTS_ONLY = (
    "{% for m in messages %}{{ m.role | upper }}: {% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ '\\n' ~ part.text }}"
    "{% endfor %} {% endfor %}"
)


def model(family: Any, template: str | None = None) -> tuple[Placeholders, ChatTemplate, Tokenizer]:
    folder = cached_tiny_media_model(family)
    media = resolve_model(str(folder)).media
    assert media is not None
    tokenizer = load_tokenizer(str(folder))
    chat_template = ChatTemplate(template or read_tokenizer_facts(Path(folder))[0] or "")
    return Placeholders(media, tokenizer, chat_template), chat_template, tokenizer


def image(num_tokens: int, name: bytes = b"x") -> PreparedItem:
    return PreparedItem("image", name * 32, num_tokens, None, {})


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def render(placeholders: Placeholders, template: ChatTemplate, *messages: Any) -> tuple[str, list[bool]]:
    typed = TypedTokens(placeholders.token)
    given = [{"role": "user", "content": content} for content in messages]
    rendered = template.render(placeholders.prepared(typed.hidden(given)), True, {})
    num_images = sum(part is IMAGE_PART for content in messages if isinstance(content, list) for part in content)
    return typed.shown(rendered, num_images)


def test_templates_that_know_of_images_get_lists() -> None:
    placeholders, template, _ = model("qwen2_vl")
    rendered, are_images = render(placeholders, template, [text("a"), IMAGE_PART, text("b")], "c")
    pad = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\na{pad}b<|im_end|>\n<|im_start|>user\nc<|im_end|>" in rendered
    assert are_images == [True]


@pytest.mark.parametrize(
    ("family", "pad"), [("qwen2_vl", "<|vision_start|><|image_pad|><|vision_end|>"), ("llava", "<image>")]
)
def test_templates_that_know_of_text_alone_get_text(family: str, pad: str) -> None:
    placeholders, template, _ = model(family, STRINGS)
    rendered, are_images = render(placeholders, template, [text("a"), IMAGE_PART, IMAGE_PART, text("b")])
    assert f"<|im_start|>user\na\n{pad}\n{pad}\nb<|im_end|>" in rendered
    assert are_images == [True, True]


def test_templates_that_know_of_lists_alone() -> None:
    """Also plain text reaches them as a list, which they would leave out otherwise."""
    placeholders, template, _ = model("llava", LISTS_ONLY)
    rendered, are_images = render(placeholders, template, [IMAGE_PART, text("What is it?")], "Say more")
    assert rendered == "USER: <image>\nWhat is it? USER: \nSay more "
    assert are_images == [True]
    assistant = {"role": "assistant", "content": "It is"}
    assert template.render_continuation([{"role": "user", "content": "Hi"}, assistant], {}).endswith(
        "ASSISTANT: \nIt is"
    )


def test_what_a_user_types_is_no_image() -> None:
    placeholders, template, tokenizer = model("qwen2_vl")
    typed = "<|image_pad|>"
    rendered, are_images = render(placeholders, template, [text(typed), IMAGE_PART, text(typed * 2)], typed)
    assert rendered.count(typed) == 5
    assert are_images == [False, True, False, False, False]
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    expanded, items = placeholders.expand(token_ids, are_images, [image(3)])
    assert len(expanded) == len(token_ids) + 2
    (item,) = items
    assert (item.num_tokens, item.key) == (3, b"x" * 32)
    places = [place for place, token_id in enumerate(token_ids) if token_id == placeholders.token_id]
    assert item.offset == places[1]


def test_an_image_token_made_of_two_parts_is_refused() -> None:
    placeholders, template, _ = model("qwen2_vl")
    with pytest.raises(InvalidRequestError, match="2 places for images where the conversation has 1"):
        render(placeholders, template, [IMAGE_PART, text("<|image_"), text("pad|>")])


def test_a_template_that_leaves_images_out_is_an_error() -> None:
    placeholders, template, _ = model("qwen2_vl", "{% for m in messages[:1] %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="0 places for images where the conversation has 1"):
        render(placeholders, template, "Hi", [IMAGE_PART])


def test_images_stand_one_behind_the_other() -> None:
    placeholders, _, _ = model("llava")
    pad = placeholders.token_id
    expanded, items = placeholders.expand(
        [1, pad, pad, 2, pad, 3], [True, False, True], [image(2, b"a"), image(1, b"b")]
    )
    assert expanded == [1, pad, pad, pad, 2, pad, 3]
    assert [(item.offset, item.num_tokens, item.key[:1]) for item in items] == [(1, 2, b"a"), (5, 1, b"b")]
