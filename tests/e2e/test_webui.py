"""The page at `/` in a real browser, used with mouse and keyboard."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support import api_server
from tests.support.chromium import Chromium, Page, run_chromium
from tests.support.media_api import qwen
from tests.support.pictures import encoded
from tests.support.server import PATIENCE_S, Server, wait_for
from tokenmill_server.multimodal.settings import MediaSettings, PromptLimits

pytestmark = pytest.mark.slow

ANSWERED = "[...document.querySelectorAll('.foot .notes')].length === {}"
HOSTILE = "<img src=x onerror=alert(1)> **<b>bold</b>** `<i>`\n```html\n<script>alert(2)</script>\n```"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    with run_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def echo() -> Iterator[api_server.Server]:
    """Answers what it is asked, over and over, to those who have a key."""
    options = {"eos_token_ids": (), "step_s": 0.005}
    with api_server.run_server(engine_options=options, api_keys=("secret",)) as server:
        yield server


def write(page: Page, field: str, text: str) -> None:
    page.click(field)
    page.run(f"document.querySelector({json.dumps(field)}).select()")
    page.type(text)


def chart(title: str) -> str:
    """JavaScript for the picture of a chart."""
    return f"document.querySelector('.chart svg[aria-label^=\"{title} in\"]')"


def enter_key(page: Page, server: api_server.Server, key: str = "secret") -> None:
    page.open(f"{server.url}/")
    page.wait("!document.querySelector('#key-form').hidden")
    write(page, "#key", key)
    page.press("Enter")


def test_a_chat_and_charts_of_it(browser: Chromium, tiny_server: Server) -> None:
    with browser.page() as page:
        page.open(f"{tiny_server.url}/")
        assert page.run("getComputedStyle(document.body).colorScheme") == "light dark"
        page.wait("document.querySelector('#health').dataset.state === 'good'")
        write(page, "#max_tokens", "20")
        write(page, "#prompt", "Hello")
        page.press("Enter")
        page.wait(ANSWERED.format(1))
        assert page.text(".user .text") == "Hello"
        assert page.text(".assistant .text")
        notes = page.text(".foot .notes")
        assert notes.startswith("20 tokens · first after ")
        assert notes.endswith("cut at the limit of tokens")
        for title in ("Tokens / s", "Running", "Waiting", "KV cache", "Preemptions / s"):
            page.wait(f"{chart(title)}.querySelector('.line').getAttribute('d').split(/[ML]/).length > 2")
        page.wait(f"parseFloat({chart('Tokens / s')}.getAttribute('aria-label').split('at most ')[1]) > 0")
        assert page.complaints == []
        assert {url for url in page.requests if not url.startswith(f"{tiny_server.url}/")} == set()


def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Chromium, tiny_server: Server) -> None:
    with browser.page(360, 640, phone=True, dark=True) as page:
        page.open(f"{tiny_server.url}/")
        light = page.run("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, light[4:-1].split(","))) < 150, "it is dark"
        page.run("document.querySelector('#ideas button').click()")
        write(page, "#prompt", "x" * 300)
        page.click("#send")
        page.wait("document.querySelector('.user')")
        for view in ("live", "settings", "chat"):
            page.click(f"[data-shows={view}]")
            assert page.run(f"document.querySelector('#{view}').getBoundingClientRect().height") > 300
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
            assert page.run(f"document.querySelector('#{view}').scrollWidth <= innerWidth")


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Chromium, echo: api_server.Server) -> None:
    with browser.page() as page:
        enter_key(page, echo, "wrong")
        page.wait("document.querySelector('#key-hint').textContent.includes('does not know')")
        write(page, "#key", "secret")
        page.press("Enter")
        page.wait("document.querySelector('#key-form').hidden")
        page.open(f"{echo.url}/")
        assert page.text("#served") == api_server.MODEL_NAME
        assert page.run("Object.keys(localStorage).length + document.cookie.length") == 0
        page.click("#forget-key")
        page.wait("!document.querySelector('#key-form').hidden")


def test_what_a_model_writes_is_text(browser: Chromium, echo: api_server.Server) -> None:
    with browser.page() as page:
        enter_key(page, echo)
        page.wait("document.querySelector('#key-form').hidden")
        write(page, "#system", HOSTILE)
        write(page, "#temperature", "0")
        write(page, "#max_tokens", "60")
        write(page, "#prompt", "x")
        page.click("#send")
        page.wait(ANSWERED.format(1))
        answer = page.text(".assistant .text")
        assert "<img src=x onerror=alert(1)>" in answer
        assert page.text(".assistant strong") == "<b>bold</b>"
        assert page.text(".assistant p code") == "<i>"
        assert page.text(".assistant pre code") == "<script>alert(2)</script>"
        assert page.run("document.querySelectorAll('#messages img, #messages script').length") == 0
        # And the browser would refuse what the page does not do.
        assert page.run("(() => { try { document.body.innerHTML = 'x'; } catch { return 'refused'; } })()") == "refused"


def test_stopping_asking_again_and_errors(browser: Chromium, echo: api_server.Server) -> None:
    (engine,) = echo.engines
    with browser.page() as page:
        enter_key(page, echo)
        page.wait("document.querySelector('#key-form').hidden")
        for number, stop in enumerate((lambda: page.click("#stop"), lambda: page.press("Escape")), 1):
            write(page, "#prompt", "and so on")
            page.press("Enter")
            page.wait("(document.querySelector('.busy .text')?.textContent ?? '').includes('and so on')")
            assert engine.num_running == 1
            stop()
            page.wait(ANSWERED.format(number))
            assert "stopped" in page.text("#messages > :last-child .notes")
            wait_for(lambda: engine.num_running == 0, PATIENCE_S, "an engine without work")
        conversation = engine.added[-1].prompt_token_ids
        assert len(conversation) > len(engine.added[-2].prompt_token_ids), "what was said before is sent along"

        write(page, "#stop-strings", "a\nb\nc\nd\ne")
        page.click("#messages > :last-child .actions > :last-child")
        page.wait("document.querySelector('.error')")
        assert "stop" in page.text(".error")
        assert "HTTP 400" in page.text(".error")
        page.click("#reset")
        write(page, "#max_tokens", "3")
        page.click("#messages > :last-child .actions > :last-child")
        page.wait("!document.querySelector('.error') && document.querySelectorAll('.foot .notes').length === 2")
        assert list(engine.added[-1].prompt_token_ids) == list(conversation)
        page.click("#new-chat")
        assert page.run("document.querySelectorAll('#messages > *').length") == 0


def test_reasoning_is_folded_however_the_stream_is_cut(browser: Chromium, tiny_server: Server) -> None:
    deltas = [{"role": "assistant"}, {"reasoning": "Let me "}, {"reasoning_content": "think ü."}, {"content": "42"}]
    stream = "".join(
        f"data: {json.dumps({'choices': [{'delta': delta}]}, ensure_ascii=False)}\r\n\r\n" for delta in deltas
    )
    script = """(async () => {
        const { events } = await import("/webui/stream.js");
        const { Answer } = await import("/webui/message.js");
        const bytes = new TextEncoder().encode(%s);
        const answer = new Answer(() => {});
        document.querySelector("#messages").append(answer.node);
        const send = (to) => { bytes.forEach((byte) => to.enqueue(Uint8Array.of(byte))); to.close(); };
        const chunks = new ReadableStream({ start: send });
        let ending = "complete";
        try {
            for await (const { choices: [{ delta }] } of events(new Response(chunks)))
                answer.add(delta.content ?? "", delta.reasoning ?? delta.reasoning_content ?? "");
        } catch (error) { ending = error.message; }
        answer.finish([], () => {});
        return ending;
    })()"""
    with browser.page() as page:
        page.open(f"{tiny_server.url}/")
        page.run("document.querySelector('#welcome').hidden = true")
        assert page.run(script % json.dumps(f"{stream}data: [DONE]\n\n")) == "complete"
        assert page.text(".assistant > .text") == "42"
        assert not page.run("document.querySelector('.reasoning').open")
        assert page.text(".reasoning summary").startswith("Thought for ")
        page.click(".reasoning summary")
        assert page.text(".reasoning .text") == "Let me think ü."
        assert "connection to the server was lost" in page.run(script % json.dumps(stream))
        error = {"error": {"message": "the engine is gone", "code": "engine_dead"}}
        assert page.run(script % json.dumps(f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n")) == "the engine is gone"


def test_images_go_along(browser: Chromium, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(encoded(np.zeros((56, 56, 3), dtype=np.uint8)))
    media = MediaSettings(limits=PromptLimits(images=2))
    with (
        api_server.run_server(engine=qwen(), engine_options={"max_model_len": 1024}, media=media) as server,
        browser.page() as page,
    ):
        page.open(f"{server.url}/")
        assert page.text("#attach") == "Image"
        page.choose_files("#files", *[str(picture)] * 3)
        page.wait("document.querySelector('#composer-hint').textContent.includes('up to 2 images')")
        page.click("#attachments button")
        assert page.run("document.querySelectorAll('#attachments img').length") == 1
        write(page, "#max_tokens", "4")
        write(page, "#prompt", "What is this?")
        page.press("Enter")
        page.wait(ANSWERED.format(1))
        assert page.run("document.querySelectorAll('.user img').length") == 1
        assert not page.run("document.querySelector('.error')")
        assert page.complaints == []
        (request,) = server.engines[0].added
        assert len(request.media) == 1
