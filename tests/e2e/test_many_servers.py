"""Servers on one machine never meet: nothing internal has a fixed place."""

import contextlib
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import start_server
from tests.support.streams import at_once

pytestmark = pytest.mark.slow


def test_six_servers_started_at_once(tiny_model: Path) -> None:
    flags = (str(tiny_model), *TINY_FLAGS[:4], "--kv-cache-memory-bytes", "8M", "--api-server-count", "2")
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(start_server(*flags, "--served-model-name", f"model-{number}", wait=False))
            for number in range(6)
        ]
        for server in servers:
            server.wait_until_ready()
        assert len({server.url for server in servers}) == 6

        def names_of(number: int) -> set[str]:
            server = servers[number]
            answers = {server.complete("a", model=f"model-{number}")["model"] for _ in range(8)}
            return answers | {model["id"] for model in server.http.get("/v1/models").json()["data"]}

        assert at_once([lambda n=n: names_of(n) for n in range(6)]) == [{f"model-{n}"} for n in range(6)]  # type: ignore[misc]
        assert at_once([server.stop for server in servers]) == [0] * 6
