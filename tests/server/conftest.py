"""Fixtures of several packages' tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.support.scripted_server import Script, ScriptedServer


@pytest.fixture
def scripted_server() -> Iterator[Callable[[Script], ScriptedServer]]:
    """Starts scripted servers that end with the test."""
    servers: list[ScriptedServer] = []

    def start(script: Script) -> ScriptedServer:
        servers.append(ScriptedServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
