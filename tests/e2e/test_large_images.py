"""Chats with images so large that processes of their own prepare them: the same replies, and nothing stays behind."""

from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.image_chats import ImageOracle
from tests.support.image_serving import Served
from tests.support.pictures import noise
from tests.support.processes import wait_for_ends
from tests.support.server import Server, start_server
from tests.support.tiny_media_models import cached_tiny_media_model

pytestmark = pytest.mark.slow


def preparing(server: Server) -> list[psutil.Process]:
    return [each for each in server.descendants() if any("image_child" in word for word in each.cmdline())]


def test_large_images() -> None:
    folder = Path(cached_tiny_media_model("llava"))
    pixels = [np.kron(noise(21, 21, seed), np.ones((100, 100, 1), np.uint8)) for seed in range(2)]
    with start_server("--model", str(folder), *TINY_FLAGS) as server:
        served = Served(server, ImageOracle(folder))
        served.check(noise(30, 40), "small")
        assert preparing(server) == []
        served.check(pixels[0], "large")
        (first,) = preparing(server)
        first.kill()
        served.check(pixels[1], "large too")
        everyone = server.descendants()
        assert len(preparing(server)) == 1
        assert server.stop() == 0
        wait_for_ends([first, *everyone])
