"""Where images stand in prompts."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.model_files import read_tokenizer_facts, resolve_model
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.parts import IMAGE_PART, PLACES, VIDEO_PART
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
    typed = TypedTokens(placeholders.tokens)
    given = [{"role": "user", "content": content} for content in messages]
    rendered = template.render(placeholders.prepared(typed.hidden(given)), True, {})
    kinds = {id(place): kind for kind, place in PLACES.items()}
    parts = [part for content in messages if isinstance(content, list) for part in content]
    return typed.shown(rendered, [kinds[id(part)] for part in parts if id(part) in kinds])


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
    hidden = TypedTokens({"image": typed})
    assert hidden.shown_length(f"{hidden.hidden(typed * 2)}{typed}") == 3 * len(typed)
    assert are_images == [False, True, False, False, False]
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    prompt = placeholders.expand(token_ids, are_images, [image(3)])
    expanded, items = prompt.token_ids, prompt.items
    assert len(expanded) == len(token_ids) + 2
    (item,) = items
    assert (item.num_tokens, item.key) == (3, b"x" * 32)
    places = [place for place, token_id in enumerate(token_ids) if token_id == placeholders.token_ids["image"]]
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
    pad = placeholders.token_ids["image"]
    prompt = placeholders.expand([1, pad, pad, 2, pad, 3], [True, False, True], [image(2, b"a"), image(1, b"b")])
    expanded, items = prompt.token_ids, prompt.items
    assert expanded == [1, pad, pad, pad, 2, pad, 3]
    assert [(item.offset, item.num_tokens, item.key[:1]) for item in items] == [(1, 2, b"a"), (5, 1, b"b")]


def video(num_tokens: int, *times: float) -> PreparedItem:
    if not times:
        return PreparedItem("video", b"v" * 32, num_tokens, None, {})
    parts = tuple(PreparedItem("video", bytes([index]) * 32, num_tokens, (1, 2, 2), {}) for index in range(len(times)))
    return PreparedItem("video", b"w" * 32, num_tokens * len(times), (len(times), 2, 2), {}, None, parts, times)


def test_images_and_videos_in_any_order() -> None:
    """Each takes the places of its kind."""
    placeholders, template, tokenizer = model("qwen2_vl")
    rendered, are_places = render(placeholders, template, [VIDEO_PART, text("<|video_pad|>"), IMAGE_PART, VIDEO_PART])
    assert rendered.count("<|vision_start|><|video_pad|><|vision_end|>") == 2
    assert are_places == [True, False, True, True]
    token_ids = tokenizer.encode(rendered, add_special_tokens=False)
    prompt = placeholders.expand(token_ids, are_places, [video(3), image(2), video(4)])
    assert [(item.kind, item.num_tokens) for item in prompt.items] == [("video", 3), ("image", 2), ("video", 4)]
    assert prompt.order == ((0, 0), (1, 0), (2, 0))
    for item in prompt.items:
        run = prompt.token_ids[item.offset : item.offset + item.num_tokens]
        assert run == [placeholders.token_ids[item.kind]] * item.num_tokens
    assert len(prompt.token_ids) == len(token_ids) + 2 + 1 + 3


def test_templates_that_order_media_otherwise() -> None:
    placeholders, _, _ = model("qwen2_vl")
    picture, film = placeholders.token_ids["image"], placeholders.token_ids["video"]
    prompt = placeholders.expand([picture, 1, film], [True, True], [video(2), image(3)])
    assert prompt.token_ids == [picture] * 3 + [1] + [film] * 2
    assert [item.kind for item in prompt.items] == ["image", "video"]
    assert prompt.order == ((1, 0), (0, 0))


def test_templates_that_know_of_images_but_not_of_videos() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<|image_pad|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
        "{% endfor %}"
    )
    placeholders, template, _ = model("qwen2_vl", source)
    rendered, are_places = render(placeholders, template, [text("a"), VIDEO_PART, IMAGE_PART])
    assert rendered == "a<|vision_start|><|video_pad|><|vision_end|><|image_pad|>"
    assert are_places == [True, True]


def test_groups_of_frames_that_are_told_their_time() -> None:
    """The text between them is what transformers' processor writes in the place of the token."""
    placeholders, _, tokenizer = model("qwen2_vl")
    film = placeholders.token_ids["video"]
    prompt = placeholders.expand([7, film, 8], [True], [video(2, 0.25, 1.3)])
    wanted = "".join(
        f"<{time:.1f} seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>" for time in (0.25, 1.3)
    )
    assert prompt.token_ids == [7, *tokenizer.encode(wanted, add_special_tokens=False), 8]
    assert prompt.order == ((0, 0), (0, 1))
    for item in prompt.items:
        assert prompt.token_ids[item.offset : item.offset + 2] == [film, film]
