"""Images on several workers over HTTP, against transformers; and servers that take text alone."""

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.image_chats import ImageOracle
from tests.support.image_serving import Served, body
from tests.support.pictures import noise
from tests.support.server import start_server
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model

pytestmark = pytest.mark.slow

SMALL_STEPS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
"""Prompts are computed in pieces that end within images."""
VARIANTS: dict[str, tuple[MediaFamily, tuple[str, ...]]] = {
    "parts": ("llava", ("-tp", "2")),
    "split": ("qwen2_5_vl", ("-tp", "2", "--mm-encoder-tp-mode", "data")),
    "stages": ("qwen3_vl", ("-pp", "2")),
    "both": ("qwen2_vl", ("-tp", "2", "-pp", "2", "--mm-encoder-tp-mode", "data")),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_transformers(variant: str) -> None:
    family, sizes = VARIANTS[variant]
    folder = cached_tiny_media_model(family)
    with start_server("--model", str(folder), *TINY_FLAGS, *SMALL_STEPS, *sizes) as server:
        served = Served(server, ImageOracle(folder))
        first, second = noise(61, 23, 1), noise(40, 30, 2)
        for _ in range(2):  # The second time from the prefix cache.
            served.check(first, "and", second, "and", first, "differ")
        served.check("no image at all")


@pytest.mark.parametrize(("family", "sizes"), [("qwen2_5_vl", ()), ("llava", ("-tp", "2"))])
def test_a_server_of_text_alone_answers_as_the_whole_model(family: MediaFamily, sizes: tuple[str, ...]) -> None:
    """And refuses images."""
    folder = cached_tiny_media_model(family)
    with start_server("--model", str(folder), *TINY_FLAGS, "--language-model-only", *sizes) as server:
        served = Served(server, ImageOracle(folder))
        served.check("no image at all")
        refused = server.http.post("/v1/chat/completions", json=body("look", noise(30, 30)))
        assert refused.status_code == 400
        assert "takes text only" in refused.json()["error"]["message"]
