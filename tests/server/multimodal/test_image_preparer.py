"""Where images are prepared, and that it makes no difference."""

import asyncio
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import psutil
import pytest

from tests.support.image_helpers import ASKING, FILE, PLAIN, helpers, in_thread, nothing, preparer, processor_of
from tests.support.pictures import data_url, encoded, noise
from tests.support.prepared_items import source
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.errors import OverloadedError
from tokenmill_server.multimodal import image_preparer, image_processes
from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.placement import CachePlacement, Placement
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.settings import MediaSettings


@pytest.fixture(scope="module")
def processor() -> ImageProcessor:
    return processor_of()


def test_threads_do_it_where_nothing_can_be_started(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    monkeypatch.setattr(image_preparer, "_LARGE_PIXELS", 0)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    images = preparer(processor)
    num_open = len(os.listdir("/proc/self/fd"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert images.prepare(PLAIN, FILE, ASKING) == in_thread(processor)
    (record,) = caplog.records
    assert "/nowhere/python" in record.getMessage()
    assert len(os.listdir("/proc/self/fd")) == num_open
    images.close()


def test_threads_do_it_where_one_ends_while_it_starts(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waited for it goes on."""
    monkeypatch.setattr(image_preparer, "_LARGE_PIXELS", 0)
    monkeypatch.setattr(image_processes, "_PROGRAM", "no_such_program")
    images = preparer(processor, image_processes=1)
    wanted = in_thread(processor)
    with ThreadPoolExecutor(5) as threads:
        running = [threads.submit(images.prepare, PLAIN, FILE, ASKING) for _ in range(5)]
        assert [each.result(PATIENCE_S) for each in running] == [wanted] * 5
    assert len(caplog.records) == 1
    assert helpers() == []
    images.close()


@pytest.mark.parametrize(
    ("kind", "side", "is_large"), [("PNG", 2100, True), ("PNG", 1900, False), ("WEBP", 1100, True)]
)
def test_which_images_are_large(processor: ImageProcessor, kind: str, side: int, is_large: bool) -> None:
    """Known from the header."""
    images = preparer(processor)
    data = encoded(np.zeros((side, side, 3), np.uint8), kind)
    assert images.prepare(PLAIN, data, ASKING) == in_thread(processor, data)
    assert len(helpers()) == is_large
    images.close()


def test_a_narrow_image_that_becomes_a_large_square() -> None:
    processor = processor_of("llava")
    padding = ImageProcessor(processor.media, replace(processor.options, pads_to_square=True))
    images = preparer(padding)
    data = encoded(noise(20, 2100))
    assert images.prepare(PLAIN, data, ASKING) == in_thread(padding, data)
    assert len(helpers()) == 1
    images.close()


class Killing:
    """An `Admit` that kills the process of the image some times."""

    def __init__(self, num_times: int) -> None:
        self.num_left = num_times

    def __call__(self, num_tokens: int) -> None:
        if self.num_left:
            self.num_left -= 1
            (helper,) = helpers()
            helper.kill()
            wait_for(lambda: helper.status() == psutil.STATUS_ZOMBIE, PATIENCE_S, "the process has ended")


def test_a_process_that_is_killed(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image is decoded once more, as if it came anew."""
    monkeypatch.setattr(image_preparer, "_LARGE_PIXELS", 0)
    images = preparer(processor, image_processes=1)
    assert images.prepare(PLAIN, FILE, Asking(Killing(1), nothing)) == in_thread(processor)
    killing = Killing(3)
    with pytest.raises(OverloadedError, match="was killed; send it again"):
        images.prepare(PLAIN, FILE, Asking(killing, nothing))
    assert killing.num_left == 1
    assert images._memory._used == {"image": 0, "video": 0}
    images.close()


def test_a_request_that_is_cancelled(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is there for the next one."""
    monkeypatch.setattr(image_preparer, "_LARGE_PIXELS", 0)
    settings = MediaSettings(loading_threads=1)
    loader = MediaLoader(processor, settings, PreparedMedia(CachePlacement(Placement.NOWHERE, 0, 0)))
    url, begun, go_on = data_url(FILE), threading.Event(), threading.Event()

    class Room(TokenRoom):
        def take(self, num_tokens: int, param: str, kind: str = "image") -> None:
            begun.set()
            go_on.wait(PATIENCE_S)

    async def work() -> PreparedItem:
        request = asyncio.ensure_future(loader.load([source(url)], Room(1000, 1000)))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        before = helpers()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        go_on.set()
        (loaded,) = await loader.load([source(url)], TokenRoom(1000, 1000))
        assert helpers() == before
        return loaded.item

    assert asyncio.run(work()) == in_thread(processor)
    loader.close()
    wait_for(lambda: not helpers(), PATIENCE_S, "the process has ended")
