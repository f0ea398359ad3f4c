"""Chats with images over HTTP and through `LLM`, with tiny models of each family, against transformers."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.e2e.conftest import TINY_FLAGS
from tests.support.image_chats import ImageOracle
from tests.support.image_serving import COUNT, Served, body
from tests.support.media_host import answer, media_host
from tests.support.pictures import data_url, encoded, noise
from tests.support.process_settings import returns_large_blocks
from tests.support.server import PATIENCE_S, start_server, wait_for
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill import LLM, RequestOutput, SamplingParams
from tokenmill_engine.errors import InvalidRequestError

pytestmark = pytest.mark.slow

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_siglip", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SMALL_STEPS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
"""Prompts are computed in pieces that end within images."""


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return cached_tiny_media_model(request.param)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    flags = (*TINY_FLAGS, *SMALL_STEPS, "--allowed-media-domains", "localhost")
    with start_server("--model", str(folder), *flags) as server:
        yield Served(server, ImageOracle(folder))


def test_images_of_several_sizes_between_text(served: Served) -> None:
    served.check("What is it?", noise(30, 40))
    served.check(noise(61, 23), "and", noise(16, 16), noise(40, 8), "differ")
    served.check("no image at all")


def test_the_cache_knows_images(served: Served) -> None:
    """A second time the prompt is found in it, and never with another image in the same place."""
    first, second, text = noise(50, 50, 1), noise(50, 50, 2), "a text that is long enough for blocks behind the image"
    cold = served.check(first, second, text)
    warm = served.check(first, second, text)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > len(cold["prompt_token_ids"]) // 2
    swapped = served.check(second, first, text)
    assert swapped["prompt_token_ids"] == warm["prompt_token_ids"]
    assert swapped["usage"]["prompt_tokens_details"]["cached_tokens"] <= 16


def test_the_same_bytes_in_another_shape_are_another_image(served: Served) -> None:
    pixels = noise(120, 80, 3)
    served.check(pixels, "what?")
    served.check(pixels.reshape(80, 120, 3), "what?")
    served.check(pixels, "what?")


def test_a_palette_is_part_of_an_image(served: Served) -> None:
    indexes = Image.fromarray(noise(30, 40)[:, :, 0] % 16)
    for seed in range(2):
        paletted = Image.new("P", indexes.size)
        paletted.putdata(list(indexes.tobytes()))
        paletted.putpalette(noise(16, 1, seed).tobytes())
        asked = body("what?")
        url = data_url(encoded(paletted))
        asked["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": url}})
        served.check_reply(served.ask(asked), [np.asarray(paletted.convert("RGB"))])


def test_everybody_at_once(served: Served) -> None:
    requests = [(noise(20 + 5 * index, 45, index), f"number {index}", noise(33, 12 * index + 9)) for index in range(8)]
    with ThreadPoolExecutor(len(requests)) as pool:
        replies = list(pool.map(lambda parts: served.ask(body(*parts)), requests))
    for (first, _, second), reply in zip(requests, replies, strict=True):
        served.check_reply(reply, [first, second])


def test_a_refused_image_leaves_nothing_behind(served: Served) -> None:
    """Neither a prompt that is too long nor one that is no image changes what the image gives later."""
    pixels = noise(44, 55, 9)
    url = "/v1/chat/completions"
    assert served.server.http.post(url, json=body(pixels, "too long " * 1000)).status_code == 400
    broken = body(pixels)
    broken["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": "data:,x"}})
    assert served.server.http.post(url, json=broken).status_code == 400
    served.check(pixels, "short")


def test_images_from_a_host(served: Served) -> None:
    pixels = noise(25, 35, 4)
    with media_host(picture=answer(encoded(pixels))) as host, media_host(picture=answer(b"")) as sink:
        asked = body("what?")
        part = {"type": "image_url", "image_url": {"url": host.url("/picture")}}
        asked["messages"][0]["content"].append(part)
        served.check_reply(served.ask(asked), [pixels])
        part["image_url"] = {"url": sink.url("/picture", "127.0.0.1")}
        assert served.server.http.post("/v1/chat/completions", json=asked).status_code == 400
        assert sink.num_connections == 0


def check_images_at_a_time(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Images of several prompts are prepared beside each other: here each waits for the other."""
    both = threading.Barrier(2)
    images = [Image.fromarray(noise(30, 40, 60 + number)) for number in range(2)]
    for image in images:
        load = image.load

        def load_beside_the_other(load: Callable[[], Any] = load) -> Any:
            both.wait(PATIENCE_S)
            return load()

        image.load = load_beside_the_other  # type: ignore[method-assign]
    prompts = [{"prompt": prompt, "multi_modal_data": {"image": image}} for image in images]
    first, second = llm.generate(prompts, params, use_tqdm=False)
    assert first.prompt_token_ids == second.prompt_token_ids
    assert int(first.request_id) < int(second.request_id)


def check_media_memory(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Of many images few are prepared before the first are answered, and none lives on after the call, whether it ends
    well or with the last of them."""
    assert llm._media is not None
    held, count = llm._media._loader.held, 60
    pictures = [Image.fromarray(noise(30, 40, 100 + number)) for number in range(count)]
    prompts = [{"prompt": prompt, "multi_modal_data": {"image": picture}} for picture in pictures]
    most, peak, take = held._max_bytes, 0, held.take_item

    def take_and_note(*args: Any) -> None:
        nonlocal peak
        take(*args)
        peak = max(peak, held.num_bytes)

    gc.collect()
    gc.disable()
    try:
        held.take_item, held._max_bytes = take_and_note, 1  # type: ignore[method-assign]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [int(output.request_id) for output in outputs] == sorted(int(output.request_id) for output in outputs)
        assert all(len(output.outputs[0].token_ids) == COUNT for output in outputs)
        one_by_one = llm.generate(prompts[-1:], params, use_tqdm=False)
        assert one_by_one[0].outputs[0].token_ids == outputs[-1].outputs[0].token_ids
        assert peak < count // 2 * 50_000
        damaged = Image.new("RGB", (30, 40))
        damaged.load = lambda: damaged.frombytes(b"")  # type: ignore[method-assign,assignment,return-value]
        with pytest.raises(InvalidRequestError, match=f"prompt {count}: "):
            llm.generate([*prompts, {"prompt": prompt, "multi_modal_data": {"image": damaged}}], params, use_tqdm=False)
        alive = [weakref.ref(picture) for picture in pictures]
        del pictures, prompts
        # A thread that had just one in hand may take a moment to let go.
        wait_for(lambda: all(each() is None for each in alive), PATIENCE_S, "the pictures to be let go")
        wait_for(lambda: held.num_bytes == 0, PATIENCE_S, "their memory to be given back")
    finally:
        held.take_item, held._max_bytes = take, most  # type: ignore[method-assign]
        gc.enable()


def check_generate(llm: LLM, chat: RequestOutput, params: SamplingParams, images: list[Any]) -> None:
    """`LLM.generate` with the text of a chat, and with its tokens, says what the chat did; other numbers of images are
    refused."""
    assert chat.prompt is not None
    ids = llm.get_tokenizer().encode(chat.prompt, add_special_tokens=False)
    assert len(ids) < len(chat.prompt_token_ids)
    beside = {"multi_modal_data": {"image": images}}
    prompts = [{"prompt": chat.prompt, **beside}, {"prompt_token_ids": ids, **beside}]
    for output in llm.generate(prompts, params, use_tqdm=False):
        assert output.prompt_token_ids == chat.prompt_token_ids
        assert output.outputs[0].token_ids == chat.outputs[0].token_ids
    with pytest.raises(
        InvalidRequestError, match=r"prompt 0: the prompt has 2 places for images, .* 1 images; write <"
    ):
        llm.generate({"prompt": chat.prompt, "multi_modal_data": {"image": images[0]}}, params)
    with pytest.raises(InvalidRequestError, match=f"has {len(chat.prompt_token_ids) - len(ids) + 2} places for images"):
        llm.generate({"prompt_token_ids": chat.prompt_token_ids, **beside}, params)


def test_offline(folder: Path) -> None:
    """`LLM.chat`, with an address and with an image itself; and `LLM.generate`."""
    oracle = ImageOracle(folder)
    pixels, other = noise(30, 40), noise(28, 70, 5)
    content = [
        {"type": "text", "text": "these"},
        {"type": "image_url", "image_url": {"url": data_url(encoded(pixels))}},
        {"type": "image_pil", "image_pil": Image.fromarray(other)},
    ]
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    settings = sys.getswitchinterval(), returns_large_blocks()
    with LLM(folder, device="cpu", dtype="float32", kv_cache_memory_bytes="64M", max_model_len=1024) as llm:
        messages = [{"role": "user", "content": content}]
        for output in llm.chat([messages, messages], params, use_tqdm=False):
            ids = output.outputs[0].token_ids
            assert len(ids) == COUNT
            assert ids == oracle.greedy(output.prompt_token_ids, [pixels, other], ids)
        check_generate(llm, output, params, [Image.fromarray(pixels), other])
        (one,) = llm.chat([{"role": "user", "content": content[2:]}], params, use_tqdm=False)
        assert one.prompt is not None
        check_images_at_a_time(llm, one.prompt, params)
        check_media_memory(llm, one.prompt, params)
        (plain,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
        ids = plain.outputs[0].token_ids
        assert ids == oracle.greedy(plain.prompt_token_ids, [], ids)
    assert settings == (sys.getswitchinterval(), returns_large_blocks()), "the process is not ours"
