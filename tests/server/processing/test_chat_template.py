import pytest

from tokenmill_engine.config.model_files import embedded_model_path, read_tokenizer_facts
from tokenmill_engine.errors import ConfigError, InvalidRequestError
from tokenmill_server.processing.chat_template import ChatTemplate, Message, text_of_content

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
USER: Message = {"role": "user", "content": "Hi"}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def test_embedded_template() -> None:
    source, bos, eos = read_tokenizer_facts(embedded_model_path())
    assert source is not None
    text = ChatTemplate(source, bos, eos).render([USER], add_generation_prompt=True, variables={})
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")


def test_blocks_are_trimmed_and_loops_controlled() -> None:
    source = (
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\nend"
    )
    assert ChatTemplate(source).render([USER, USER], True, {}) == "Hi\nend"


def test_special_tokens_and_variables_are_visible() -> None:
    template = ChatTemplate("{{ bos_token }}|{{ eos_token }}|{{ mood }}", "<s>", "</s>")
    assert template.render([USER], True, {"mood": "calm"}) == "<s>|</s>|calm"
    assert "mood" in template.variables


def test_json_keeps_letters_and_signs() -> None:
    template = ChatTemplate("{{ messages[0] | tojson }}{{ messages[0].content | tojson(indent=2) }}")
    assert template.render([{"role": "user", "content": "é<&"}], True, {}) == '{"role": "user", "content": "é<&"}"é<&"'


def test_generation_blocks_show_their_body() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render([USER], True, {}) == "[Hi]"


def test_current_time() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([USER], True, {}).startswith("20")


def test_developer_is_system_for_templates_that_never_heard_of_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert ChatTemplate(CHATML).render([message], False, {}) == "<|system|>x</s>\n"
    knowing = ChatTemplate("{% if messages[0].role == 'developer' %}D{% endif %}")
    assert knowing.render([message], False, {}) == "D"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "fails on this conversation"),
        ("{{ messages[7].content.nothing }}", "rejects this conversation"),
        ("{{ messages.__class__.__mro__ }}", "rejects this conversation"),
        ("{{ messages.append(1) }}", "rejects this conversation"),
    ],
)
def test_template_errors_are_request_errors(source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        ChatTemplate(source).render([USER], True, {})
    assert caught.value.param == "messages"


def test_a_broken_template_is_a_start_error() -> None:
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate("a\n{% if %}")


@pytest.mark.parametrize("content", ["OK!\n", "OK! ", "OK!", "  OK!\t\n", "", " ", "a\n\nb  \n"])
@pytest.mark.parametrize("source", [CHATML, TRIMMING])
def test_continuation_ends_with_the_exact_text(source: str, content: str) -> None:
    prompt = ChatTemplate(source).render_continuation([USER, assistant(content)], {})
    assert prompt == f"<|user|>Hi</s>\n<|assistant|>{content}"


def test_continuation_of_text_that_occurs_before() -> None:
    prompt = ChatTemplate(CHATML).render_continuation([{"role": "user", "content": "OK"}, assistant("OK")], {})
    assert prompt == "<|user|>OK</s>\n<|assistant|>OK"


def test_continuation_lets_the_template_see_the_message() -> None:
    source = "{% for m in messages if '</think>' in m.content %}T{{ m.content.split('</think>')[1] }}.{% endfor %}"
    assert ChatTemplate(source).render_continuation([assistant("<think>a</think>b ")], {}) == "Tb "


def test_a_template_that_leaves_the_message_out() -> None:
    with pytest.raises(InvalidRequestError, match="leaves out"):
        ChatTemplate("nothing").render_continuation([assistant("x")], {})


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert text_of_content(parts, "p") == "a\nb\nc"
    assert text_of_content("x", "p") == "x"
    assert text_of_content(None, "p") is None


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "p[0].type"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "p[1].type"),
        ([{"type": "text"}], "p[0].text"),
        ([5], "p[0].type"),
        (5, "p"),
    ],
)
def test_other_content_is_refused(content: object, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        text_of_content(content, "p")
    assert caught.value.param == param


def test_loops_say_where_they_are_and_nothing_of_themselves() -> None:
    template = "{% for message in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }} {% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(template).render(messages, False, {}) == "0TrueFalse 1FalseTrue "
    prying = ChatTemplate("{% for message in messages %}{{ loop._iterable }}{{ loop.__class__.__mro__ }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        prying.render(messages, False, {})
